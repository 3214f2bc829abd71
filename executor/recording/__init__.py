"""The accelerator of a rank, and what is recorded of a run: spans, memory, heartbeats, errors."""
