"""Recipes: one instruction per env that can be carried out anywhere."""
