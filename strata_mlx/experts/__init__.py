"""Experts on disk under a memory budget."""
