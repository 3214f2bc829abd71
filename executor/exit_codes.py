"""Exit codes of commands that measure."""

INTERRUPTED = 130
"""Stopped by Ctrl-C; what was measured until then is written."""
