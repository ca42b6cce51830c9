"""Collectors on several machines: a node host on each, which runs a pool of them, and the fleet of all."""
