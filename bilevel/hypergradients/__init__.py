"""Hypergradients, estimates of their error, and the curvature of the lower loss."""
