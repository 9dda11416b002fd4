"""The gallery compared with other packages: PyTorch, TorchOpt, scikit-image and scikit-learn.

    pip install torch torchopt scikit-image  # in a separate environment, with this package
                                             # (--peers without a name: scikit-learn only)
    python benchmarks/peers/gallery_peers.py       # ten minutes

- *Sinusoids* (`examples/meta_learning.py`): MAML by hand in PyTorch, from the same initialization
  on tasks of the same distribution, evaluated by the same curve. Hypergradients of this code and of
  TorchOpt on the same tasks take turns with ours.
- *Images* (`examples/denoising.py`): scikit-image's denoisers on the same noisy images. Their
  parameters come from grids on the same training images.
- *Reviews* (`examples/text_transformer.py`): logistic regression on the presence of the same words.
- *Kernels* (`examples/kernel_learning.py`): Gaussian processes by marginal likelihood on the same
  rows.
"""

import itertools
import sys
import time
from pathlib import Path

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np

import bilevel
from benchmarks import harness
from benchmarks.harness import environment, where
from benchmarks.peers import peers

MEASURES = ("bilevel/hypergradients", "bilevel/solvers", "bilevel/nets/convolution.py")

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def sinusoids(steps, rounds, libraries):
    """Return rows of the libraries' hypergradients, and of PyTorch's training."""
    import meta_learning as example

    start, tasks = example.initial(jax.random.key(0)), example.sinusoids(jax.random.key(1))
    w = jax.tree.map(lambda a: jnp.zeros((example.TASKS, *a.shape)), start)
    (solver,) = example.ways(["MAML"]).values()
    problem = bilevel.Problem(example.each, example.mean)
    gradient = jax.jit(bilevel.hypergradient(problem, solver, diagnostics=False))
    flat, back = jax.flatten_util.ravel_pytree(start)

    def here(alpha):
        return jax.flatten_util.ravel_pytree(gradient(back(alpha), w, *tasks).grad)[0]

    by, same = {"here": here}, (back, tasks, example.RATE, example.STEPS)
    if {"torch", "torchopt"} & set(libraries):
        from benchmarks.peers import gallery_peers_torch as theirs
    if "torch" in libraries:
        by["PyTorch by hand"] = theirs.gradient(*same, hand=True)
    if "torchopt" in libraries:
        by["TorchOpt"] = theirs.gradient(*same, hand=False)
    yield from peers.in_turns("sinusoids", flat, by, rounds)
    if "torch" not in libraries:
        return
    draw = jax.jit(example.sinusoids)
    keys = jax.random.split(jax.random.key(2), steps)
    began = time.process_time()
    alpha = theirs.trained(start, map(draw, keys), example.RATE, example.STEPS)
    seconds = time.process_time() - began
    row = {"part": "sinusoids", "start": f"PyTorch's MAML, {steps:,} steps"}
    yield row | example.curve(alpha) | {"seconds": round(seconds, 1)}


def images(data="cifar10", **sizes):
    """Return rows of scikit-image's denoisers."""
    import denoising as example
    from skimage import restoration

    parts = example.photographs(data, **{"train": 20, "test": 60} | sizes)
    (clean, noisy), (clean_t, noisy_t) = ([np.array(x) for x in part] for part in parts)
    weights = [{"weight": float(a)} for a in np.geomspace(0.02, 0.5, 13)]
    patches = [
        {"h": float(h), "sigma": example.NOISE, "patch_size": size, "fast_mode": False}
        for h, size in itertools.product(example.NOISE * np.linspace(0.4, 1.2, 5), (3, 5))
    ]
    methods = {
        "total variation (Chambolle)": (restoration.denoise_tv_chambolle, weights),
        "total variation (split Bregman)": (
            restoration.denoise_tv_bregman,
            [{"weight": float(a)} for a in np.geomspace(2, 50, 13)],
        ),
        "non-local means": (restoration.denoise_nl_means, patches),
    }

    def error(method, flags, noisy, clean):
        return np.mean([(method(a, **flags) - b) ** 2 for a, b in zip(noisy, clean, strict=True)])

    for name, (method, grid) in methods.items():
        errors = [error(method, flags, noisy, clean) for flags in grid]
        best = grid[int(np.argmin(errors))]
        row = {"part": "images", "denoiser": f"{name}, of {len(grid)}"}
        row["test, dB"] = example.decibels(error(method, best, noisy_t, clean_t))
        yield row | {"training, dB": example.decibels(min(errors))}


def reviews(*sizes):
    import text_transformer as example

    return example.reviews(*sizes)


def random_reviews(*sizes):
    """Return the same number of random reviews, for --smoke."""
    import text_transformer as example

    rng = np.random.default_rng(0)
    shapes = [(n, example.LENGTH) for n in sizes]
    return [(rng.integers(example.WORDS, size=s), rng.integers(2, size=s[0])) for s in shapes]


def texts(parts):
    """Return rows of logistic regression on words, with the penalty chosen on clean reviews."""
    import text_transformer as example
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import log_loss

    def presence(words):
        present = np.zeros((len(words), example.WORDS))
        np.put_along_axis(present, words, 1, 1)
        return present[:, 1:]

    (x, y), (xc, yc), (xt, yt) = [(presence(words), y) for words, y in parts]
    draw = np.random.default_rng(0)  # as in the example
    source = draw.integers(0, len(example.ERRORS), len(y))
    noisy = np.where(draw.random(len(y)) < np.asarray(example.ERRORS)[source], 1 - y, y)
    best = source == 0
    trainings = {
        "the clean reviews": (xc[::2], yc[::2]),  # the other half chooses the penalty
        "all sources": (x, noisy),
        "source 0": (x[best], noisy[best]),
        "source 0 and the clean reviews": (
            np.concatenate([x[best], xc[::2]]),
            np.concatenate([noisy[best], yc[::2]]),
        ),
    }
    for name, data in trainings.items():
        fits = [LogisticRegression(C=c, max_iter=1000).fit(*data) for c in np.geomspace(1e-3, 1, 7)]
        losses = [log_loss(yc[1::2], fit.predict_proba(xc[1::2])) for fit in fits]
        fit = fits[int(np.argmin(losses))]
        row = {"part": "texts", "trained on": name, "validation loss": min(losses)}
        row["test loss"] = log_loss(yt, fit.predict_proba(xt))
        yield row | {"test error": float(np.mean(fit.predict(xt) != yt))}


def kernels(data="mnist", train=200, test=2000):
    """Return rows of scikit-learn's Gaussian processes: minus log likelihoods per row and class."""
    import kernel_learning as example
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process import kernels as of

    x, y, xt, labels = map(np.asarray, example.load(data, train, test))
    wide = of.ConstantKernel(1.0, (1e-3, 1e3))
    noise = of.WhiteKernel(1e-2, (1e-9, 10))
    length = float(np.sqrt(x.shape[1]))
    bounds = (0.01 * length, 100 * length)
    choices = {
        "Gaussian": wide * (of.RBF(length, bounds) + noise),
        "rational quadratic": wide
        * (of.RationalQuadratic(length, length_scale_bounds=bounds) + noise),
        "Matern 5/2": wide * (of.Matern(length, bounds, nu=2.5) + noise),
        "linear": wide * (of.DotProduct(length, bounds) + noise),
    }
    for name, kernel in choices.items():
        began = time.process_time()
        model = GaussianProcessRegressor(kernel, n_restarts_optimizer=2, random_state=0).fit(x, y)
        row = {"part": "kernels", "kernel": name}
        row["value"] = -float(model.log_marginal_likelihood_value_) / y.size
        row["test error"] = float(np.mean(model.predict(xt).argmax(1) != labels))
        yield row | {"seconds": round(time.process_time() - began, 1)}


# ----------------------------------------------------------------------------- the report


def of_part(part):
    def of_rows(rows):
        rows_of_part = where(rows, part=part)
        if not rows_of_part:
            return "No run yet."
        return harness.table_of([{k: row[k] for k in row if k != "part"} for row in rows_of_part])

    return of_rows


of_hypergradients = peers.of_hypergradients
of_sinusoids, of_images, of_texts, of_kernels = map(
    of_part, ("sinusoids", "images", "texts", "kernels")
)


def report(rows):
    tables = {"hypergradients": of_hypergradients, "sinusoids": of_sinusoids}
    tables |= {"images": of_images, "texts": of_texts, "kernels": of_kernels}
    parts = {row["part"] for row in rows}
    return "\n\n".join(of(rows) for part, of in tables.items() if part in parts)


def measured(size, libraries):
    small = size != "default"
    sizes = {"smoke": (40, 40, 40), "quick": (200, 100, 200), "default": (12_000, 500, 3000)}[size]
    yield from texts((random_reviews if size == "smoke" else reviews)(*sizes))
    few = 20 if size == "smoke" else 60
    yield from kernels(*(("digits", few, few) if small else ()))
    if "scikit-image" in libraries:
        data = {"data": "digits"} if size == "smoke" else {}
        yield from images(**data, **({"train": 2, "test": 2} if small else {}))
    yield from sinusoids(*((20, 1) if small else (6000, 5)), libraries)


PEERS = "torch", "torchopt", "scikit-image"


def main():
    flags = harness.command_line(__file__, __doc__, report, peers=PEERS)
    rows = [environment(*PEERS, "scikit-learn"), *measured(flags.size, flags.peers)]
    harness.finish(rows, flags.results, report)


if __name__ == "__main__":
    main()
