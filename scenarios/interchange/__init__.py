"""Plans as configurations of other trainers, written and read back: one module a target, all in `targets`."""
