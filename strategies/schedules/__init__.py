"""Published pipeline schedules, one family a file: the order of a rank's actions and what its paper says of it."""
