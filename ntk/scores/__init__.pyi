# Public names of `ntk.scores` and their modules, imported on first use.

from .gradient_based import (
    fisher,
    grad_norm,
    grasp,
    jacov,
    knas,
    knas_released,
    l2_norm,
    nasi,
    snip,
    synflow,
    zico,
)
from .kernel_based import (
    condition_number,
    cosine_min_eigenvalue,
    eigen_nas,
    label_energy,
    log_traces,
    min_eigenvalue,
    of_kernel,
    spectral_entropy,
    te_nas,
)
from .relu_based import naswot, regions, wrcor

__all__ = [
    "condition_number",
    "cosine_min_eigenvalue",
    "eigen_nas",
    "fisher",
    "grad_norm",
    "grasp",
    "jacov",
    "knas",
    "knas_released",
    "l2_norm",
    "label_energy",
    "log_traces",
    "min_eigenvalue",
    "nasi",
    "naswot",
    "of_kernel",
    "regions",
    "snip",
    "spectral_entropy",
    "synflow",
    "te_nas",
    "wrcor",
    "zico",
]
