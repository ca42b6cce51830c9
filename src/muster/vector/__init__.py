"""Vector envs: the verbs, and how one is put together from a backend and parts."""
