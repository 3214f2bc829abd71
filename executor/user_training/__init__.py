"""Runs of a user's file: his module, data, loss and optimizer, trained by ranks that a launcher starts."""
