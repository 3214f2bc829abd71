"""Embedding tables over devices and hosts: placements, what each device then has to do, and the search for them."""
