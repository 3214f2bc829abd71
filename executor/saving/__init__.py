"""Checkpoints of a user's module on disk: written whole or not at all, beside steps, and those of other programs."""
