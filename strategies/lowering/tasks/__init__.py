"""Tasks of a training step: how passes are cut into tasks, what each task waits for, and what it does."""
