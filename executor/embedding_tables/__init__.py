"""Embedding tables of a user's own module, each cut over the data ranks."""
