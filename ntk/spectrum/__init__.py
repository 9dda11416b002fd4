"""Eigenvalues of kernel matrices, and certificates for the smallest one."""
