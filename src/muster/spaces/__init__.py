"""Gymnasium's spaces: as trees of leaves, compared, and stacked."""
