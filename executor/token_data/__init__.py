"""Tokens of a user in files: indexed, raw, in tables or as text, cut into samples of equal length."""
