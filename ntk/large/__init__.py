"""Kernels larger than memory: operators, preconditioned solvers, eigenvalue intervals."""
