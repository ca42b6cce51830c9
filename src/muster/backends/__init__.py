"""Backends step the envs in the caller, in its threads, or in worker processes, all by one stepping loop."""
