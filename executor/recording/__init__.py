"""What a rank computes on, and what is recorded of it: spans, memory, signs of life."""
