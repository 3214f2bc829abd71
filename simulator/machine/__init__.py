"""What a cluster is made of, as plain values, and how long its devices compute."""
