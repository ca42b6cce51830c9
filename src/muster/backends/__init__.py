"""Where envs are stepped: in the caller (serial) or in worker processes. One stepping loop serves them all."""
