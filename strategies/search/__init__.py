"""Search: one driver, and one file per algorithm."""
