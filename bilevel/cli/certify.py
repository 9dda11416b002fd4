"""``bilevel certify``: the smallest eigenvalue of the kernel, for every mixture of activations.

The kernel of infinite width on real data is ``K_alpha = sum_ij alpha_i alpha_j K_ij``. Its smallest
eigenvalue is certified at each single activation, and over the whole simplex: a bracket around
``min over alpha of lambda_min(K_alpha)``, which is as a rule at no single activation.
"""

import math
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bilevel import data as datasets
from bilevel import plots
from bilevel._progress import RunBar
from bilevel.cli import report
from bilevel.cli.commands import Certify
from bilevel.cli.runs import run_directory
from bilevel.spaces.activations import activation_space, unit_inputs
from bilevel.spaces.kernels import KernelSpace
from ntk.certificate import certified_min_eigenvalue, certify_simplex


def run_certify(config: Certify) -> dict[str, Any]:
    """Run the job; print its table, write its run directory, return what `result.json` holds."""
    config.check()
    with run_directory(config) as folder:
        return _run(config, folder)


def _run(config: Certify, folder: pathlib.Path) -> dict[str, Any]:
    with report.phases(config.progress, _work(config)) as bar:
        result, arrays, spectra = _computed(config, bar)
    report.write(folder, result, arrays)
    _picture(folder, config, spectra)
    _print(result, folder)
    return result


def _work(config: Certify) -> dict[str, float]:
    """How long each phase takes, roughly: a pair of activations, a cell, a spectrum count as 1."""
    count = len(config.activations)
    pairs = count * (count + 1) / 2
    return {"data": 1, "kernels": pairs, "certificate over the simplex": pairs, "spectra": count}


def _computed(
    config: Certify, bar: RunBar
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    began = time.perf_counter()
    space = activation_space(config.activations, width=math.inf)
    assert isinstance(space, KernelSpace)
    bar.enter("data")
    # In float64, whatever the user's setting, which stays as it is.
    with jax.enable_x64(True):
        x = unit_inputs(jnp.asarray(_rows(config), float))
        bar.enter("kernels")
        blocks, error = map(np.asarray, space.blocks(x, error=True))
    bar.enter("certificate over the simplex")
    start = time.perf_counter()
    found = certify_simplex(blocks, rtol=config.rtol, entry_error=error)
    simplex_seconds = time.perf_counter() - start
    bar.enter("spectra")
    alphas = dict(zip(space.names, np.eye(len(space.names)), strict=True))
    alphas |= {"uniform mixture": np.full(len(space.names), 1 / len(space.names))}
    alphas |= {"worst mixture": found.argmin}
    kernels = {name: np.einsum("i,ijnm,j->nm", a, blocks, a) for name, a in alphas.items()}
    # The rounding of the sum itself is added; alpha is on the simplex.
    noise = 1e-15 * len(blocks) ** 2 * np.abs(blocks).max()
    errors = {name: np.einsum("i,ijnm,j->nm", a, error, a) + noise for name, a in alphas.items()}
    spectra = {name: np.linalg.eigvalsh(kernel) for name, kernel in kernels.items()}
    result = {
        "config": report.flags(config),
        "names": list(space.names),
        "kernels": {
            name: {
                "alpha": alphas[name].tolist(),
                "min_eigenvalue": float(spectra[name][0]),
                "certified_min_eigenvalue": certified_min_eigenvalue(kernel, errors[name]),
                "max_eigenvalue": float(spectra[name][-1]),
            }
            for name, kernel in kernels.items()
        },
        "simplex": {
            "lower": found.lower,
            "upper": found.upper,
            "argmin": found.argmin.tolist(),
            "cells": found.cells,
            "converged": found.converged,
        },
        "entry_error": float(error.max()),
        "seconds": {"simplex": simplex_seconds, "all": time.perf_counter() - began},
        **report.origin(),
    }
    arrays = {"x": np.asarray(x)}
    arrays |= {f"spectrum {name}": values for name, values in spectra.items()}
    return result, arrays, spectra


def _rows(config: Certify) -> np.ndarray:
    data = datasets.load(config.data)
    if config.rows > len(data.x_train):
        raise ValueError(f"rows: expected at most {len(data.x_train)}, got {config.rows}.")
    (rows,) = datasets.split(jax.random.key(config.seed), data.y_train, (config.rows,))
    x = data.x_train[rows].reshape(config.rows, -1)
    distinct = len(np.unique(x, axis=0))
    if distinct < len(x):
        raise ValueError(
            f"data: expected distinct rows, got {distinct} different ones among {len(x)}: "
            "the smallest eigenvalue of every kernel is 0."
        )
    return x


def _picture(folder: pathlib.Path, config: Certify, spectra: dict[str, np.ndarray]) -> None:
    def draw(figure):
        ax = plots.spectrum(spectra, figure.subplots())
        ax.legend(loc="center left", bbox_to_anchor=(1, 0.5))
        rows = f"{config.data}: {config.rows} rows, seed {config.seed}"
        ax.set_title(f"{rows}; tangent kernels at infinite width")

    report.picture(folder / "spectrum.png", (7.5, 4), draw)


def _print(result: dict[str, Any], folder: pathlib.Path) -> None:
    from rich.table import Table

    screen = report.screen()
    config, simplex = result["config"], result["simplex"]
    table = Table(title=f"{config['data']}: kernels of {config['rows']} rows at infinite width")
    table.add_column("activation", no_wrap=True)
    for heading in ("λ_min", "certified ≥", "λ_max", "λ_max / λ_min"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in result["kernels"].items():
        least, most = row["min_eigenvalue"], row["max_eigenvalue"]
        ratio = f"{most / least:.3g}" if least > 0 else "∞"
        bound = report.at_least(row["certified_min_eigenvalue"], 7)
        last_vertex = name == result["names"][-1]
        table.add_row(name, f"{least:.7g}", bound, f"{most:.4g}", ratio, end_section=last_vertex)
    screen.print(table)
    gap = (simplex["upper"] - simplex["lower"]) / max(abs(simplex["upper"]), 1e-300)
    lower, upper = report.at_least(simplex["lower"], 7), report.at_most(simplex["upper"], 7)
    screen.print(
        f"over the simplex, min λ_min(K_α) is in [{lower}, {upper}]: "
        f"relative gap {gap:.1e}, {simplex['cells']} cells",
        markup=False,
    )
    if not simplex["converged"]:
        screen.print(
            f"wider than --rtol {config['rtol']:g}: too near 0 for float64, or too many cells"
        )
    screen.print("worst mixture: " + report.mixture(simplex["argmin"], result["names"]))
    screen.print(
        f"kernel entries are exact to {result['entry_error']:.0e}, as their computation says"
    )
    seconds = result["seconds"]
    screen.print(
        f"simplex {seconds['simplex']:.1f} s, all {seconds['all']:.0f} s; results in {folder}"
    )
