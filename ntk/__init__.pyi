# The public names of `ntk`, and where they are: each is imported when it is first used.

from . import bounds, networks, scores
from .compat.load import neural_tangents
from .empirical.kernels import (
    empirical_kernel,
    empirical_nngp,
    gradient_norms,
    kernel_vector_product,
)
from .empirical.linearize import linearize, taylor_expand
from .expectations.activations import (
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
from .infinite.dual_activation import dual
from .infinite.mixtures import mixture_blocks, mixture_kernel
from .infinite.network_kernel import lemma1_kernel_as_printed, network_kernel
from .kernels.functions import kernel_matrix, kernel_mixture
from .kernels.record import Kernels
from .large.eigenvalue_interval import EigenvalueInterval, eigenvalue_interval
from .large.empirical_operator import EmpiricalOperator
from .large.iterative_regression import IterativeRegression, SolverState, iterative_regression
from .large.kernel_operator import KernelOperator
from .large.leave_one_out import LeaveOneOut, leave_one_out_estimate
from .large.partial_cholesky import PartialCholesky, partial_cholesky
from .regression.gaussian_process import Prediction, ensemble, posterior
from .regression.kernel_regression import (
    ExcessRisk,
    KernelRegression,
    excess_risk_term,
    gradient_flow,
    kernel_regression,
)
from .spectrum.certificate import Certificate, certified_min_eigenvalue, certify_simplex
from .spectrum.eigenvalues import Eigenpair, eigenvalues, min_eigenvalue, smallest_eigenpair

__version__: str

__all__ = [
    "Activation",
    "Certificate",
    "Eigenpair",
    "EigenvalueInterval",
    "EmpiricalOperator",
    "ExcessRisk",
    "IterativeRegression",
    "KernelOperator",
    "KernelRegression",
    "Kernels",
    "LeaveOneOut",
    "PartialCholesky",
    "Prediction",
    "SolverState",
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
    "gradient_norms",
    "identity",
    "iterative_regression",
    "kernel_matrix",
    "kernel_mixture",
    "kernel_regression",
    "kernel_vector_product",
    "leaky_relu",
    "leave_one_out_estimate",
    "lemma1_kernel_as_printed",
    "linearize",
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
