"""Searches of deep networks with shared weights: the common pipeline, and one file per space."""
