"""Vector envs: the methods that users call, and the assembly of a vector env from a backend and parts."""
