"""Models of single kernels: matrix products, attention and what memory bounds, from their shape to seconds."""
