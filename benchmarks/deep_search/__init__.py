"""Searches of deep networks: activations and skips, DARTS, GAEA, Eigen-NAS."""
