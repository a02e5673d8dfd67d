"""Recipes: schema, loading, checks. Imports no torch."""
