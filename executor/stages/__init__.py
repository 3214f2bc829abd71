"""A user's module in stages of a pipeline: its graph, where it is cut, the stages of a rank, and the step."""
