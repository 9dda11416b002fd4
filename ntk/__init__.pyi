# The public names of `ntk`, and where they are: each is imported when it is first used.

from . import bounds, networks, scores
from .activations import (
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
from .certificate import Certificate, certified_min_eigenvalue, certify_simplex
from .duals import dual
from .finite import empirical_kernel, gradient_norms, kernel_vector_product
from .infinite import lemma1_kernel_as_printed, network_kernel
from .kernels import Kernels
from .mixtures import mixture_blocks, mixture_kernel
from .regression import (
    ExcessRisk,
    KernelRegression,
    excess_risk_term,
    gradient_flow,
    kernel_regression,
)
from .spectrum import Eigenpair, eigenvalues, min_eigenvalue, smallest_eigenpair

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
    "networks",
    "relu",
    "scores",
    "sigmoid",
    "smallest_eigenpair",
    "swish",
    "tanh",
]
