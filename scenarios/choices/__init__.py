"""Choices beyond the fastest plan: the machine and the batch of a whole run, the plan for bad days, plans that tie."""
