"""Traces of steps in the forms that other programs read, and their traces read here."""
