"""Gaussian expectations of activation functions and their products."""
