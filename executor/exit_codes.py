"""Exit codes of commands that measure."""

INTERRUPTED = 130
"""As a shell says of a process that SIGINT ended: 128 + 2. What was measured until then is written."""
