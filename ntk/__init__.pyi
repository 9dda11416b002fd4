# The public names of `ntk`, and where they are: each is imported when it is first used.

from . import bounds, networks, scores
from .compat.load import neural_tangents
from .empirical.kernels import empirical_kernel, empirical_nngp, kernel_vector_product
from .empirical.taylor_expansion import taylor_expand
from .expectations.activations import (
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
from .infinite.dual_activation import dual
from .infinite.mixtures import mixture_blocks, mixture_kernel
from .infinite.network_kernel import lemma1_kernel_as_printed, network_kernel
from .kernels.functions import kernel_matrix
from .kernels.record import Kernels
from .large.eigenvalue_interval import eigenvalue_interval
from .large.iterative_regression import iterative_regression, leave_one_out_estimate
from .large.kernel_operator import EmpiricalOperator, KernelOperator
from .large.partial_cholesky import partial_cholesky
from .regression.gaussian_process import ensemble, posterior
from .regression.kernel_regression import excess_risk_term, gradient_flow, kernel_regression
from .spectrum.certificate import Certificate, certified_min_eigenvalue, certify_simplex
from .spectrum.eigenvalues import eigenvalues, min_eigenvalue, smallest_eigenpair

__version__: str

__all__ = [
    "Certificate",
    "EmpiricalOperator",
    "KernelOperator",
    "Kernels",
    "activation",
    "bounds",
    "certified_min_eigenvalue",
    "certify_simplex",
    "dual",
    "eigenvalue_interval",
    "eigenvalues",
    "empirical_kernel",
    "empirical_nngp",
    "ensemble",
    "erf",
    "excess_risk_term",
    "gelu",
    "gradient_flow",
    "identity",
    "iterative_regression",
    "kernel_matrix",
    "kernel_regression",
    "kernel_vector_product",
    "leaky_relu",
    "leave_one_out_estimate",
    "lemma1_kernel_as_printed",
    "min_eigenvalue",
    "mixture_blocks",
    "mixture_kernel",
    "network_kernel",
    "networks",
    "neural_tangents",
    "partial_cholesky",
    "posterior",
    "relu",
    "scores",
    "sigmoid",
    "smallest_eigenpair",
    "swish",
    "tanh",
    "taylor_expand",
]
