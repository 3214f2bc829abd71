"""Training of a user's module whose operators are cut over ranks."""
