"""A plan in the words of other systems: one file each, all of them in `executor.export.targets`."""
