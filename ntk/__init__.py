"""Neural tangent kernels of finite and infinitely wide networks, and their smallest eigenvalues.

================  ==================================================================================
infinite width    ``network_kernel``, ``mixture_blocks``, ``mixture_kernel``; ``dual``, activations
any layers        ``ntk.networks``: convolutions, pooling, biases, residual blocks; finite too
finite width      ``empirical_kernel``, ``empirical_nngp``, ``kernel_vector_product``,
                  ``taylor_expand``
eigenvalues       ``min_eigenvalue``, ``certified_min_eigenvalue``, ``certify_simplex``
with a kernel     ``kernel_regression``, ``gradient_flow``, ``excess_risk_term``
with two kernels  ``posterior``, ``ensemble``: predictions with their covariance
of any size       ``KernelOperator``, ``EmpiricalOperator``; ``iterative_regression``,
                  ``partial_cholesky``, ``eigenvalue_interval``, ``leave_one_out_estimate``
theory, search    ``ntk.bounds``, ``ntk.scores``
a peer            ``neural_tangents``: that library, on today's JAX
================  ==================================================================================

Nothing of `bilevel` is imported here.

The names and their places: ``__init__.pyi``. They are imported when they are first used.
"""

import lazy_loader

_imported, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name):
    if name != "__version__":
        return _imported(name)
    from importlib import metadata

    try:
        return metadata.version("bilevel")  # the distribution that has both packages
    except metadata.PackageNotFoundError:  # on the path, but not installed
        return "unknown"
