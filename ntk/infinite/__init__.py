"""Kernels of infinitely wide networks and of mixtures of activations."""
