"""Activation search in one hidden layer (Oymak et al. 2021, section 4.2).

    f(x) = V' s_alpha(W x),    s_alpha = sum_i alpha_i s_i,    alpha on the simplex

==========  ==========================================================================
paper       here
==========  ==========================================================================
W           ``w`` [width, inputs], drawn from N(0, 1) and trained: the weights
v           fixed to +- sqrt(c0 / width), half each; one column per class, mutually
            orthogonal sign patterns, so that classes share only ``w``
c0          ``output_scale``
L_T         half the summed squared error to labels +-1, Eq. (9)
L_V         ``outer``: hinge (the paper's), logistic or squared, mean over the labels
A(alpha)    T gradient steps from the initial ``w``: the space's ``solver``
==========  ==========================================================================

Inputs have unit norm. :func:`unit_inputs` also subtracts their mean, which makes the kernel far
better conditioned. At ``width=math.inf`` the network is kernel ridge regression:
:mod:`bilevel.spaces.kernels`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import ntk
from bilevel.contracts import LowerSolver
from bilevel.internal import checks
from bilevel.internal.precision import squarable
from bilevel.nets.evaluation import wrong_rows
from bilevel.problem.problem import Problem
from bilevel.solvers import restarted, unrolled
from bilevel.spaces.kernels import KernelSpace, kernel_space
from bilevel.spaces.space import Space, distinct, name_of, on_simplices
from bilevel.spaces.targets import OUTER_LOSSES, like_outputs, predict_labels, validation_loss
from bilevel.spaces.targets import sign_labels as sign_labels
from ntk.expectations.activations import Activation

Elementwise = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Activation] = {
    "relu": ntk.relu,
    "leaky_relu": ntk.leaky_relu(0.1),
    "sigmoid": ntk.sigmoid,
    "tanh": ntk.tanh,
    "swish": ntk.swish,
    "gelu": ntk.gelu,
    "erf": ntk.erf,
    "identity": ntk.identity,
}
"""Candidates by name; the sigmoid is centred, the leaky ReLU's slope is 0.1."""


@dataclasses.dataclass(frozen=True)
class ActivationSpace(Space):
    """An activation search space; see :func:`activation_space`.

    ``alpha`` [h] is one simplex, ``w`` is [width, inputs], an architecture is an activation's name.
    Batches are ``(x, y)``: x [n, inputs], outputs ``f`` [n] for two classes, [n, classes] for more,
    and y like ``f`` with entries +-1 (``outer="squared"``: any real numbers).

    ``curvatures(w, x) -> [h]`` are the largest Hessian eigenvalues of the lower loss linearised at
    ``w``, one for each activation. They are the argument of
    ``solver(curvatures, steps=50, momentum=0.9, backprop=None, rate=None) -> LowerSolver``.
    """

    curvatures: Callable[[jax.Array, jax.Array], jax.Array]
    solver: Callable[..., LowerSolver]


def activation_space(
    activations: Sequence[str | Elementwise],
    *,
    width: float = 512,
    classes: int = 2,
    outer: str = "hinge",
    output_scale: float = 1.0,
) -> ActivationSpace | KernelSpace:
    """Make a space of one hidden layer with a mixture of activations.

    Parameters
    ----------
    activations : sequence of str or function
        Names in ``ACTIVATIONS``, or elementwise functions. At infinite width functions have to be
        smooth, or from `ntk` (:func:`ntk.leaky_relu`).
    width : int or math.inf
        Hidden units k; even. For more than two classes, a multiple of the power of two above
        ``classes``, because each class needs its own sign pattern. ``math.inf`` for kernel ridge
        regression (:class:`bilevel.spaces.kernels.KernelSpace`).
    classes : int
        2 for one output with labels +-1, more for one-vs-rest; ignored at infinite width.
    outer : {"hinge", "logistic", "squared"}
    output_scale : float
        c0: the initial function's variance is ``c0 Var s_alpha(g)``, g ~ N(0, 1).

    Raises
    ------
    ValueError
        If a name is unknown, there are no activations, ``width`` does not fit the classes, or
        ``output_scale`` is not positive and finite. The losses raise it if targets and outputs
        differ in shape.

    Examples
    --------
    >>> space = activation_space(["relu", "tanh"], width=8)
    >>> x = unit_inputs(jnp.eye(3))
    >>> w = space.init(jax.random.key(0), (x, sign_labels(jnp.array([0, 1, 1]), 2)))
    >>> space.apply(w, jnp.array([0.5, 0.5]), x).shape
    (3,)

    At infinite width a search is that of :func:`bilevel.spaces.features.feature_space`, with
    ``train = space.blocks(x), y`` and ``valid = space.blocks(x_valid, x), y_valid``.
    """
    activations = checks.sequence("activations", activations)
    functions = tuple(_elementwise_activation(a) for a in activations)
    if not functions:
        raise ValueError("activations: expected at least one name or function, got none.")
    checks.one_of("outer", outer, OUTER_LOSSES)
    checks.check_in_range("output_scale", output_scale, 0, math.inf)
    names = distinct([a if isinstance(a, str) else name_of(a) for a in activations])
    if width == math.inf:
        return kernel_space(names, functions, outer, output_scale)
    patterns = _sign_patterns(width, classes)
    scale = np.sqrt(np.asarray(output_scale / len(patterns), jnp.result_type(float)))
    outputs = jax.device_put(patterns * scale)

    def init(key, batch):
        return jax.random.normal(key, (len(patterns), batch[0].shape[-1]))

    def forward(function, w, x):
        f = function(x @ w.T) @ outputs.astype(w.dtype)
        return f[:, 0] if patterns.shape[1] == 1 else f

    def apply(w, alpha, x):
        def mixture(z):
            return sum(alpha[i] * s(z) for i, s in enumerate(functions))

        return forward(mixture, w, x)

    def lower(w, alpha, batch):
        x, y = batch
        f = apply(w, alpha, x)
        return 0.5 * jnp.sum((like_outputs(f, y) - f) ** 2)

    def curvatures(w, x):
        maps = [functools.partial(forward, s, x=x) for s in functions]
        return jnp.stack([_largest_gauss_newton_eigenvalue(f, w) for f in maps])

    def solver(curvatures, steps=50, momentum=0.9, backprop=None, rate=None):
        def run(lower, alpha, w, state, batch):
            step = _step_size(alpha, curvatures) if rate is None else rate
            optimizer = optax.sgd(step, momentum or None, nesterov=True)
            descent = unrolled(optimizer, steps, backprop=backprop)
            return descent.run(lower, alpha, w, descent.init(w), batch)[0], state

        return restarted(LowerSolver(init=lambda w: (), run=run))

    return ActivationSpace(
        names=names,
        sets="simplex",
        **on_simplices(names)._asdict(),
        init=init,
        apply=apply,
        problem=Problem(lower, validation_loss(apply, outer)),
        predict=predict_labels,
        curvatures=curvatures,
        solver=solver,
    )


def _elementwise_activation(a: str | Elementwise) -> Elementwise:
    if callable(a):
        return a
    if not isinstance(a, str) or a not in ACTIVATIONS:
        raise ValueError(
            f"activations: expected functions or names among {', '.join(ACTIVATIONS)}, got {a!r}."
        )
    return ACTIVATIONS[a]


def _sign_patterns(width: float, classes: int) -> np.ndarray:
    """Return [width, outputs] of +-1: balanced columns, mutually orthogonal (Walsh functions)."""
    classes = checks.integer("classes", classes, 2)
    outputs = 1 if classes == 2 else classes
    period = 1 << outputs.bit_length()
    if checks.real_number("width", width) < period or width % period:
        raise ValueError(
            f"width: expected a multiple of {period} for {classes} classes, got {width}."
        )
    shared_bits = np.arange(int(width))[:, None] & (1 + np.arange(outputs))[None]
    return 1 - 2 * (np.bitwise_count(shared_bits).astype(np.int8) % 2)


def _largest_gauss_newton_eigenvalue(
    f: Callable[[jax.Array], jax.Array], w: jax.Array, iterations: int = 100
) -> jax.Array:
    """Return the largest eigenvalue of ``J'J``, J = df/dw, within 10 % from below.

    Nesterov's steps with momentum 0.9 are stable up to 36 % above 1 / lambda_max.
    """
    _, push = jax.linearize(f, w)
    pull = jax.linear_transpose(push, w)

    def step(v, _):
        u = pull(push(v))[0]
        size = jnp.linalg.norm(u)
        return u / jnp.where(size == 0, 1, size), size

    start = jax.random.normal(jax.random.key(0), w.shape, w.dtype)
    return jax.lax.scan(step, start / jnp.linalg.norm(start), length=iterations)[1][-1]


def _step_size(alpha: jax.Array, curvatures: jax.Array) -> jax.Array:
    """Return ``1 / (sum_i alpha_i sqrt(lambda_i))^2``, at most 1 / lambda_max of the mixture.

    The axes of ``w``, with ones, give each copy of ``stack_problems`` its own.
    """
    return 1 / jnp.sum(alpha * jnp.sqrt(curvatures), axis=-1)[..., None, None] ** 2


@functools.partial(jax.jit, static_argnums=0)
def losses_by_row(
    space: ActivationSpace, w: chex.Array, alpha: chex.Array, batch: tuple[chex.Array, chex.Array]
) -> dict[str, jax.Array]:
    """Return {"loss", "error"} [seeds, n]: the outer loss of every row, and 1 for a wrong label.

    All arguments lead with the seeds. Outputs that are not finite are wrong.
    """

    def of_one_row(w, alpha, x, y):
        row = x[None], y[None]
        f, labels = space.apply(w, alpha, row[0]), space.predict(row[1])
        wrong = wrong_rows(space.predict, f, labels)
        return {"loss": space.problem.outer(w, alpha, row), "error": wrong[0].astype(float)}

    of_one_seed = jax.vmap(of_one_row, (None, None, 0, 0))
    return jax.vmap(of_one_seed)(w, alpha, *batch)


def unit_inputs(x: chex.Array, *others: jax.Array) -> jax.Array | tuple[jax.Array, ...]:
    """Flatten rows, subtract the mean of the rows of ``x``, and scale to unit norm.

    Raises
    ------
    ValueError
        If there are no rows, entries are not real, or a row equals the mean. Traced rows at the
        mean become NaN.

    Examples
    --------
    >>> unit_inputs(jnp.array([[0.0, 0.0], [2.0, 0.0]]))
    Array([[-1., 0.], [ 1., 0.]], dtype=float...)
    """
    arrays = [checks.float_array("x", a) for a in (x, *others)]
    for a in arrays:
        if a.ndim == 0 or a.size == 0:
            raise ValueError(f"x: expected inputs [n, ...] with n at least 1, got shape {a.shape}.")
    unit, nonzero = _centred_unit_rows(arrays)
    if checks.concrete(nonzero) and not nonzero:
        raise ValueError("x: expected rows that differ from their mean, got one that does not.")
    return unit if others else unit[0]


@jax.jit
def _centred_unit_rows(parts: list[jax.Array]) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Return unit rows of every part, and whether all rows differ from the mean."""
    flat = squarable([a.reshape(len(a), -1) for a in parts])
    low = flat[0].min(axis=0)  # the mean of equal values could differ from them by rounding
    mean = jnp.where(low == flat[0].max(axis=0), low, flat[0].mean(axis=0))
    centred = [a - mean[None] for a in flat]
    norms = [jnp.linalg.norm(a, axis=1, keepdims=True) for a in centred]
    unit = tuple(a / norm for a, norm in zip(centred, norms, strict=True))
    return unit, jnp.stack([norm.all() for norm in norms]).all()
