"""Tiny checkpoints of every family as they are published, and what others compute from them."""
