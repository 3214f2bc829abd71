"""Operator-level parallelism: a sharding for every operator, chosen together: costs, solvers and plans."""
