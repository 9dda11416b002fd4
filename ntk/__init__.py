"""Neural tangent kernels of finite and infinitely wide networks, and their smallest eigenvalues.

================  ==================================================================================
infinite width    ``network_kernel``, ``mixture_blocks``, ``mixture_kernel``; ``dual``, activations
finite width      ``empirical_kernel``, ``kernel_vector_product``, ``gradient_norms``
eigenvalues       ``min_eigenvalue``, ``certified_min_eigenvalue``, ``certify_simplex``
with a kernel     ``kernel_regression``, ``gradient_flow``, ``excess_risk_term``
theory, search    ``ntk.bounds``, ``ntk.scores``
================  ==================================================================================

Nothing of `bilevel` is imported here.
"""

from ntk import bounds, scores
from ntk.activations import (
    Activation,
    activation,
    erf,
    gelu,
    identity,
    leaky_relu,
    relu,
    sigmoid,
    swish,
    tanh,
)
from ntk.certificate import Certificate, certified_min_eigenvalue, certify_simplex
from ntk.duals import dual
from ntk.finite import empirical_kernel, gradient_norms, kernel_vector_product
from ntk.infinite import lemma1_kernel_as_printed, network_kernel
from ntk.kernels import Kernels
from ntk.mixtures import mixture_blocks, mixture_kernel
from ntk.regression import (
    ExcessRisk,
    KernelRegression,
    excess_risk_term,
    gradient_flow,
    kernel_regression,
)
from ntk.spectrum import Eigenpair, eigenvalues, min_eigenvalue, smallest_eigenpair

__all__ = [
    "Activation",
    "Certificate",
    "Eigenpair",
    "ExcessRisk",
    "KernelRegression",
    "Kernels",
    "activation",
    "bounds",
    "certified_min_eigenvalue",
    "certify_simplex",
    "dual",
    "eigenvalues",
    "empirical_kernel",
    "erf",
    "excess_risk_term",
    "gelu",
    "gradient_flow",
    "gradient_norms",
    "identity",
    "kernel_regression",
    "kernel_vector_product",
    "leaky_relu",
    "lemma1_kernel_as_printed",
    "min_eigenvalue",
    "mixture_blocks",
    "mixture_kernel",
    "network_kernel",
    "relu",
    "scores",
    "sigmoid",
    "smallest_eigenpair",
    "swish",
    "tanh",
]
