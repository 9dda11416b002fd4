"""What kernels of infinite and finite networks cost and how right they are."""
