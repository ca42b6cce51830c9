"""The things that hold envs: in a worker process, in a thread, in the caller."""
