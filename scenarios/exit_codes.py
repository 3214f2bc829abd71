"""What the process of a command ends with; 0 where it has done what it was asked for."""

FAILED = 1
BAD_INPUT = 2
NOTHING_FITS = 3
INTERRUPTED = 130
"""As a shell says of a process that SIGINT ended: 128 + 2."""
