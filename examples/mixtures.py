"""Non-negative mixtures: a weight for each wavelength when spectra are unmixed.

    python mixtures.py

A spectrum is a mixture of known materials with unknown amounts of at least 0. Non-negative least
squares finds the amounts. Wavelengths differ in noise, and some have a background that no material
explains. A weight for each wavelength, exp(alpha), is learned on mixtures with known amounts. The
baselines weigh all wavelengths equally, or by the inverse variance of their residuals.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.optimize import nnls

import bilevel

FULL = [{}]
X64 = True


def spectra(seed=0, bands=60, materials=6, mixtures=40):
    """Return materials [bands, materials], and parts of (mixtures, amounts), one for each column.

    Half of the amounts are 0. The background has two peaks, and the noise grows with wavelength.
    """
    rng = np.random.default_rng(seed)
    wavelength = np.linspace(0, 1, bands)[:, None]
    widths, centers = rng.uniform(0.03, 0.15, (2, materials)), rng.uniform(0, 1, (2, materials))
    peaks = [np.exp(-(((wavelength - c) / w) ** 2)) for c, w in zip(centers, widths, strict=True)]
    pure = peaks[0] + 0.5 * peaks[1]
    background = np.exp(-(((wavelength - np.array([0.25, 0.7])) / 0.05) ** 2))

    def part():
        amounts = rng.exponential(size=(materials, mixtures)) * (
            rng.random((materials, mixtures)) < 0.5
        )
        noise = 0.01 * (1 + 9 * wavelength) * rng.normal(size=(bands, mixtures))
        return pure @ amounts + background @ rng.exponential(size=(2, mixtures)) + noise, amounts

    return pure, part(), part(), part()


def main(steps=100, rate=0.1, mixtures=40):
    """Return a row for each choice of weights, and the learned weights."""
    pure, *parts = spectra(mixtures=mixtures)
    (train, known), (valid, target), (test, truth) = parts
    rows = []

    def lower(amounts, alpha, batch):
        squares = jnp.exp(alpha)[:, None] * (jnp.asarray(pure) @ amounts - batch) ** 2
        return jnp.sum(squares) / 2

    def outer(amounts, alpha, batch):
        return jnp.mean((amounts - batch) ** 2)

    forward = bilevel.projected("nonnegative")
    problem, solver = bilevel.Problem(lower, outer), bilevel.implicit(forward)
    zero = jnp.zeros(known.shape)
    run = jax.jit(
        lambda alpha, mixed: forward.run(lower, alpha, zero, forward.init(zero), mixed)[0]
    )

    def row(name, alpha, began):
        errors = [
            float(outer(run(alpha, mixed), alpha, amounts))
            for mixed, amounts in ((train, known), (valid, target), (test, truth))
        ]
        names = ("training error", "validation error", "test error")
        rows.append({"weights of wavelengths": name} | dict(zip(names, errors, strict=True)))
        rows[-1]["seconds"] = round(time.process_time() - began, 1)
        print(rows[-1])

    began = time.process_time()
    equal = jnp.zeros(len(pure))
    row("equal", equal, began)
    amounts = np.asarray(run(equal, test))
    alone = nnls(pure, test[:, 0])[0]  # SciPy's active-set method
    assert np.abs(amounts[:, 0] - alone).max() < 1e-6
    residuals = pure @ np.asarray(run(equal, train)) - train
    inverse = -jnp.log(jnp.mean(residuals**2, 1))
    row("inverse variance of the residuals", inverse - inverse.mean(), began)
    began = time.process_time()
    rule = optax.adam(optax.cosine_decay_schedule(rate, steps))
    data = inverse - inverse.mean(), zero, train, known
    flags = {"steps": steps, "progress": False, "diagnostics": False}
    result = bilevel.search(problem, solver, rule, *data, **flags)
    row(f"learned in {steps} steps", result.alpha, began)
    return rows, np.asarray(result.alpha)


def picture(drawn, figure):
    """Draw the learned weight of each wavelength."""
    (alpha,) = drawn
    ax = figure.subplots()
    ax.plot(np.linspace(0, 1, len(alpha)), alpha)
    ax.set(xlabel="wavelength", ylabel="log weight")


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", X64)
    main()
