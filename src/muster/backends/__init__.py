"""Where envs are stepped: in the caller, in its threads, or in worker processes. One stepping loop serves them all."""
