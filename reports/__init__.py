"""Pictures, traces, tables and documents made of timelines, trials and accuracy rows."""
