"""Collectors on several machines."""
