"""Wrong arguments raise one message that names the argument, before anything long is computed.

Each row is one mistake: the call, the exception's type, and a regular expression that its message
has to match. Rows stand in the order of the packages.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import bilevel

PROBLEM = bilevel.Problem(
    lower=lambda w, alpha, batch: 0.5 * jnp.sum((w - alpha) ** 2),
    outer=lambda w, alpha, batch: jnp.sum(w**2),
)
W0, ALPHA, SGD = jnp.zeros(2), jnp.ones(2), optax.sgd(0.1)


def hypergradient(problem=PROBLEM, alpha=ALPHA, w0=W0, train=None, valid=None, **options):
    return bilevel.hypergradient(problem, bilevel.implicit(), **options)(alpha, w0, train, valid)


def search(optimizer=SGD, alpha=ALPHA, w0=W0, steps=1, **options):
    arguments = PROBLEM, bilevel.implicit(), optimizer, alpha, w0, None, None
    return bilevel.search(*arguments, steps=steps, progress=False, **options)


# (call, exception, message)
HYPERGRADIENTS = [
    (lambda: hypergradient(alpha="one"), ValueError, "alpha"),
]
SOLVERS = []
OUTER_LOOP = [
    (lambda: search(steps=0), ValueError, "steps"),
]
RUNS = []
STOCHASTIC = []
LINEAR_AND_BASELINES = []
SPACES = []
NETS_AND_DATA = []
STRATEGIES = []
THEORY = []
NTK_KERNELS = []
NTK_NETWORKS = []
NTK_SPECTRUM_AND_BOUNDS = []
NTK_REGRESSION_AND_LARGE = []
NTK_SCORES = []

ROWS = {
    "hypergradients": HYPERGRADIENTS,
    "solvers": SOLVERS,
    "outer_loop": OUTER_LOOP,
    "runs": RUNS,
    "stochastic": STOCHASTIC,
    "linear_and_baselines": LINEAR_AND_BASELINES,
    "spaces": SPACES,
    "nets_and_data": NETS_AND_DATA,
    "strategies": STRATEGIES,
    "theory": THEORY,
    "ntk_kernels": NTK_KERNELS,
    "ntk_networks": NTK_NETWORKS,
    "ntk_spectrum_and_bounds": NTK_SPECTRUM_AND_BOUNDS,
    "ntk_regression_and_large": NTK_REGRESSION_AND_LARGE,
    "ntk_scores": NTK_SCORES,
}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        pytest.param(*row, id=f"{area}-{number}")
        for area, rows in ROWS.items()
        for number, row in enumerate(rows)
    ],
)
def test_a_wrong_argument_raises_one_message_that_names_it(call, error, message):
    with pytest.raises(error, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, jax.errors.JAXTypeError)
