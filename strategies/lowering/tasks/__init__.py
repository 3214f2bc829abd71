"""The tasks of a training step: how passes are cut, what waits for what, and what each task does."""
