"""Regression and Gaussian-process prediction with a kernel matrix."""
