"""Cost and accuracy of kernels of infinite and finite networks."""
