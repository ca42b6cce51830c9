"""Collectors in processes of their own."""
