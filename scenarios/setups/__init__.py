"""Which machine and which batch: a scenario on several numbers of nodes, with the bill of a whole training run."""
