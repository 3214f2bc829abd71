"""Operator-level parallelism: a layout for every operator, chosen together."""
