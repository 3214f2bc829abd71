"""Our own laboratory: every technique, faults, predictions and devices, as rows."""
