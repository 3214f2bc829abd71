"""What the process of a command ends with; 0 where it has done what it was asked for."""

from executor.exit_codes import INTERRUPTED as INTERRUPTED

DONE = 0
FAILED = 1
BAD_INPUT = 2
NOTHING_FITS = 3
