"""Published pipeline schedules, the order of a rank's actions, one family a file."""
