"""Training of a user's own module, with his data and optimizer, by torch's own data parallelism and sharded states."""
