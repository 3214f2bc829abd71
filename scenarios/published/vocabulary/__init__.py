"""The words that fields of a published run may have: a table of names and aliases, and what reads it."""
