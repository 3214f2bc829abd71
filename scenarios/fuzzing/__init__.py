"""Mutated inputs for every parser of outside data: each must give a value or the one input error, soon and in little.

``python -m scenarios.fuzzing all --inputs 10000`` runs them; input ``i`` of a seed is always the same.
"""
