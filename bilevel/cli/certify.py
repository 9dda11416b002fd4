"""``bilevel certify``: certify the smallest eigenvalue of the kernel, for every mixture.

The kernel is that of activations in a hidden layer of infinite width, ``K_alpha = sum_ij alpha_i
alpha_j K_ij``, or of user-defined kernel functions, ``sum_i alpha_i k_i``. The command certifies
the smallest eigenvalue at each vertex, and its minimum over the simplex.
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel.cli.runtime import memory, report
from bilevel.cli.runtime.command_run import CommandRun, Result
from bilevel.internal.import_function import called, takes
from bilevel.nets.images import unit_images
from bilevel.plots import plots
from bilevel.spaces.activations import activation_space, unit_inputs
from ntk.bounds.bound import rounded
from ntk.kernels.functions import mixed_blocks
from ntk.spectrum.certificate import certified_min_eigenvalue, certify_simplex

_MIXTURES = "uniform mixture", "worst mixture"  # rows of the table, next to the kernels


class _CertifyRun(CommandRun):
    """Eigenvalues of ``K_alpha = sum_ij alpha_i alpha_j K_ij`` on some rows, in float64."""

    labels = False
    figure, size = "spectrum.png", (7.5, 4)
    spectra: dict[str, np.ndarray]  # of all kernels in the table

    def prepare(self) -> None:
        name = self.config.kernel
        self.kernels = {} if name is None else _import_kernels(name)
        self.names = tuple(self.kernels) or self.config.activations
        self.kind = name or "tangent kernels at infinite width"

    def arrays(self) -> list[memory.Parts]:
        count, rows = len(self.names), self.config.rows
        return [{("rows",): [memory.shape(count, count, rows, rows, dtype="float64")] * 2}]

    def result(self) -> tuple[Result, dict[str, Any]]:
        count = self.config.rows
        rows = self.data.training_rows(jax.random.key(self.config.seed), count)
        distinct = len(np.unique(rows.reshape(count, -1), axis=0))
        if distinct < count:
            raise ValueError(
                f"data: expected distinct rows, got {distinct} different ones among {count}: "
                "the smallest eigenvalue of every kernel is 0."
            )
        # In float64, without a change of the user's setting.
        with jax.enable_x64(True):
            x, values, errors = self._blocks(rows)
        result = self._certified(values, errors)
        result["seconds"]["all"] = self.seconds()
        spectra = {_array_name(name): values for name, values in self.spectra.items()}
        return result, {"x": np.asarray(x)} | spectra

    def _blocks(self, rows: np.ndarray) -> tuple[Any, np.ndarray, np.ndarray]:
        """Return the inputs, the blocks ``K_ij`` [h, h, n, n], and the errors of their entries."""
        if self.kernels:
            images = rows.ndim > 2
            (x,) = unit_images(rows, pixels=self.config.pixels) if images else (unit_inputs(rows),)
            self.bars.enter("kernels")
            return x, *mixed_blocks(tuple(self.kernels.values()), x)
        space: Any = activation_space(self.names, width=math.inf)
        x = unit_inputs(jnp.asarray(rows.reshape(len(rows), -1), float))
        self.bars.enter("kernels")
        values, errors = map(np.asarray, space.blocks(x, error=True))
        return x, values, errors

    def _certified(self, values: np.ndarray, error: np.ndarray) -> Result:
        """Return bounds at each vertex and over the simplex."""
        names = self.names
        self.bars.enter("certificate over the simplex")
        start = time.perf_counter()
        certificate = certify_simplex(values, rtol=self.config.rtol, entry_error=error)
        simplex_seconds = time.perf_counter() - start
        self.bars.enter("spectra")
        alphas = dict(zip(names, np.eye(len(names)), strict=True))
        if len(names) > 1:
            uniform = np.full(len(names), 1 / len(names))
            alphas |= zip(_MIXTURES, (uniform, certificate.argmin), strict=True)
        # The sum itself is rounded too; alpha is on the simplex.
        noise = 1e-15 * len(values) ** 2 * np.abs(values).max()
        self.spectra, kernels = {}, {}
        for name, a in alphas.items():
            kernel, off = (np.einsum("i,ijnm,j->nm", a, blocks, a) for blocks in (values, error))
            self.spectra[name] = spectrum = np.linalg.eigvalsh(kernel)
            kernels[name] = {
                "alpha": a.tolist(),
                "min_eigenvalue": float(spectrum[0]),
                "certified_min_eigenvalue": certified_min_eigenvalue(kernel, off + noise),
                "max_eigenvalue": float(spectrum[-1]),
            }
        return {
            "names": list(names),
            "kernels": kernels,
            "simplex": {
                **{k: getattr(certificate, k) for k in ("lower", "upper", "cells", "converged")},
                "argmin": certificate.argmin.tolist(),
            },
            "entry_error": float(error.max()),
            "seconds": {"simplex": simplex_seconds},
        }

    def draw(self, figure: Any, result: Result) -> None:
        config, ax = result["config"], plots.spectrum(self.spectra, figure.subplots())
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        rows = f"{config['data']}: {config['rows']} rows, seed {config['seed']}"
        ax.set_title(f"{rows}; {self.kind}")

    def show(self, result: Result) -> tuple[str, str]:
        config, simplex = result["config"], result["simplex"]
        table = report.result_table(
            f"{config['data']}, {config['rows']} rows: {self.kind}",
            "kernel" if config["kernel"] else "activation",
            *("λ_min", "certified ≥", "λ_max", "λ_max / λ_min"),
        )
        for name, row in result["kernels"].items():
            least, most = row["min_eigenvalue"], row["max_eigenvalue"]
            ratio = f"{most / least:.3g}" if least > 0 else "∞"
            bound = rounded(row["certified_min_eigenvalue"], 7)
            last_vertex = name == result["names"][-1]
            cells = f"{least:.7g}", bound, f"{most:.4g}", ratio
            table.add_row(name, *cells, end_section=last_vertex)
        self.console.print(table)
        gap = (simplex["upper"] - simplex["lower"]) / max(abs(simplex["upper"]), 1e-300)
        lower = rounded(simplex["lower"], 7)
        upper = rounded(simplex["upper"], 7, upper=True)
        self.console.print(
            f"minimum of λ_min(K_α) over the simplex: in [{lower}, {upper}], relative gap "
            f"{gap:.1e} (proved on {simplex['cells']} cells)"
        )
        if not simplex["converged"]:
            self.console.print(
                f"This is wider than --rtol {config['rtol']:g}: the minimum is too near 0 for "
                "float64, or needs too many cells."
            )
        self.console.print("worst mixture: " + report.mixture(simplex["argmin"], result["names"]))
        how = "measured, not proved" if config["kernel"] else "estimated with the entries"
        self.console.print(f"kernel entries are exact to {result['entry_error']:.0e}, {how}")
        seconds = result["seconds"]
        times = f"{seconds['all']:.0f} s, of which simplex {seconds['simplex']:.1f} s"
        names = ", ".join(result["names"])
        mixtures = "every mixture of " * (len(result["names"]) > 1) + names
        sentence = f"λ_min ≥ {lower} for {mixtures} on these {config['rows']} rows."
        if not simplex["lower"] > 0:
            sentence = f"no positive lower bound of λ_min for {mixtures} on these rows ({lower})."
        return sentence, times


def _array_name(kernel: str) -> str:
    """Return the name of the kernel's spectrum in ``arrays.npz``."""
    return f"spectrum_{kernel}".replace(" ", "_")


def _import_kernels(name: str) -> dict[str, Callable[..., Any]]:
    """Return the kernel functions of MODULE:FUNCTION, by name."""
    returned = called("kernel", name)
    kernels = returned if isinstance(returned, Mapping) else {name.partition(":")[2]: returned}
    texts = all(isinstance(key, str) and key not in _MIXTURES for key in kernels)
    if not kernels or not texts or not all(map(callable, kernels.values())):
        raise ValueError(
            f"kernel: expected {name} to return a kernel function, or several by name, got "
            f"{returned!r}."
        )
    if len({*map(_array_name, (*kernels, *_MIXTURES))}) < len(kernels) + len(_MIXTURES):
        raise ValueError(
            f"kernel: expected names that differ by more than spaces and underscores, got "
            f"{[*kernels]}."
        )
    for key, kernel in kernels.items():
        takes("kernel", key, kernel, 2)
    return dict(kernels)
