"""Collectors on several machines: a node on each, which runs a pool of them."""
