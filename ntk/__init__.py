"""Neural tangent kernels of finite and infinitely wide networks.

Exact kernels, and with them their smallest eigenvalues and certificates, arrive with the next
release; nothing is public here yet. This package imports nothing of `bilevel`.
"""
