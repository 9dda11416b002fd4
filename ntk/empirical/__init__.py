"""Kernels of finite networks, gradients in factors, and expansions in the parameters."""
