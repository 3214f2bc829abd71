"""Builders of operator graphs."""
