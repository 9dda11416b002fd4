"""Search of activations and skip connections, layer by layer (Zhu et al. 2022).

    f_1 = s_1(W_1 x),    f_l = s_l(W_l f_{l-1}) + a_{l-1} f_{l-1}  (2 <= l <= L-1),
    f = W_L f_{L-1},     s_l = sum_i p_{l,i} sigma_i,  p_l on the simplex,  a_l in [0, 1]

==========  ============================================================================
paper       here
==========  ============================================================================
L, m        ``depth``, ``width``
sigma_l     ``alpha["activations"]`` [L-1, h]: the mixture p of each layer; uniform at first
alpha_l     ``alpha["skips"]`` [L-2]: the weights a; 1/2 at first
W_l         ``w``: ``first`` [d, m], ``hidden`` [L-2, m, m], ``last`` [m, outputs]; no biases
==========  ============================================================================

The search is DARTS's (section 5.1). Its network is then trained from scratch by SGD, the second
half of Algorithm 1 (:func:`bilevel.nets.train`). At ``width=math.inf`` the network is kernel ridge
regression with its exact neural tangent kernel. The paper has two initialisations:

================  ==================================  ==============================================
parametrization   weights                             the network
================  ==================================  ==============================================
``"ntk"``         N(0, 1); scaled in the forward      Lemma 1's: variances (1, 2, ..., 2), and
                  pass by 1, sqrt(2/m), ...           :func:`ntk.network_kernel` is its kernel
``"as_printed"``  N(0, 1/m) in all layers             Algorithm 1's and Theorem 2's: pre-activations
                                                      of size 1/sqrt(m), so that smooth activations
                                                      act as their tangents at 0, and the kernel's
                                                      smallest eigenvalue goes to 0 as m grows
``"he"``          N(0, 2/m) in all layers             as printed, but with ReLU-like activations
                                                      its empirical kernels are those of "ntk"
                                                      (its outputs are sqrt(2/m) times those)
================  ==================================  ==============================================

Reference: Zhu, Liu, Chrysos, Cevher, Generalization Properties of NAS under Activation and Skip
Connection Search, NeurIPS 2022: Eq. (1), section 3, Algorithm 1, section 5.1.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, overload

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import ntk
from bilevel.internal.checks import check_finite, integer, one_of, sequence
from bilevel.spaces.activations import ACTIVATIONS
from bilevel.spaces.kernels import KernelFunctionSpace, kernel_search
from bilevel.spaces.space import Space, on_simplices
from bilevel.spaces.targets import OUTER_LOSSES, cross_entropy_problem, predict_labels
from ntk.expectations.activations import Activation

Alpha = dict[str, jax.Array]

CANDIDATES = ("relu", "leaky_relu", "sigmoid", "tanh", "swish")
"""The paper's candidates; the sigmoid is centred, the leaky ReLU's slope is 0.1."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class SkipArchitecture:
    """One activation per layer, with or without a skip connection around it; static to JAX."""

    activations: tuple[str, ...]
    skips: tuple[bool, ...]

    def __str__(self) -> str:
        marks = ["+skip" if skip else "" for skip in (False, *self.skips)]
        return ", ".join(map(str.__add__, self.activations, marks))


def parse_skip_architecture(text: str) -> SkipArchitecture:
    """Return the architecture of ``str(architecture)``."""
    layers = text.split(", ")
    skips = tuple(layer.endswith("+skip") for layer in layers[1:])
    return SkipArchitecture(tuple(layer.removesuffix("+skip") for layer in layers), skips)


@dataclasses.dataclass(frozen=True)
class SkipSpace(Space):
    """A search space of activations and skip connections; see :func:`skip_space`.

    ``alpha`` is {"activations": [L-1, h] on simplices, "skips": [L-2] in the box}, at first uniform
    and 1/2; ``w`` are flax parameters. Batches are ``(x, labels)``: x [n, inputs], labels [n]
    integers from 0, outputs ``f`` [n] for two classes, [n, classes] for more. Both losses are the
    mean cross-entropy. An architecture is a :class:`SkipArchitecture`: the likeliest activations,
    and the skips above 1/2. ``apply`` and ``problem`` also take an architecture instead of
    ``alpha``: the plain network of that architecture on the same weights.

    ``kernel(alpha, x, x2=None) -> ntk.Kernels`` is the kernel of the infinitely wide network, in
    NTK parametrization; ``alpha`` may be an architecture.
    """

    kernel: Callable[..., ntk.Kernels]


@dataclasses.dataclass(frozen=True)
class SkipKernelSpace(KernelFunctionSpace):
    """The same search at infinite width; ``skip_space(..., width=math.inf)`` makes it.

    ``alpha`` is {"kernel": the alpha of :class:`SkipSpace`, "log_penalty"}. An architecture is a
    :class:`SkipArchitecture`; its vertex has the penalty of the start. ``kernel`` takes
    ``alpha["kernel"]`` or an architecture, as in :class:`SkipSpace`.
    """

    kernel: Callable[..., ntk.Kernels]


@overload
def skip_space(
    activations: Sequence[str | Activation] = ...,
    *,
    depth: int = ...,
    width: int = ...,
    classes: int = ...,
    parametrization: str = ...,
    outer: str = ...,
) -> SkipSpace: ...
@overload
def skip_space(
    activations: Sequence[str | Activation] = ...,
    *,
    depth: int = ...,
    width: float,  # math.inf
    classes: int = ...,
    parametrization: str = ...,
    outer: str = ...,
) -> SkipKernelSpace: ...
def skip_space(
    activations: Sequence[str | Activation] = CANDIDATES,
    *,
    depth: int = 10,
    width: int | float = 1024,
    classes: int = 10,
    parametrization: str = "ntk",
    outer: str = "logistic",
) -> SkipSpace | SkipKernelSpace:
    """Make a space of the networks of Eq. (1), to search activations and skip connections.

    Parameters
    ----------
    activations : sequence
        Names in ``bilevel.spaces.activations.ACTIVATIONS``, or activations of :mod:`ntk`.
    depth : int
        L, at least 3: weight matrices, including the last one.
    width : int or math.inf
        m; ``math.inf`` for kernel ridge regression (:class:`SkipKernelSpace`).
    classes : int
        2 for one output and the paper's logistic loss (of ``y f``, y = 2 label - 1). More for one
        output each and the softmax's cross-entropy, which generalises it.
    parametrization : {"ntk", "as_printed", "he"}
        See the module's table; at infinite width ``"ntk"``.
    outer : {"hinge", "logistic", "squared"}
        At infinite width, the outer loss of ``y f``; ``y`` from
        :func:`bilevel.spaces.targets.sign_labels`.

    Raises
    ------
    ValueError
        If a name is unknown or repeated, there are under 3 layers or 2 classes, or
        ``parametrization`` is not ``"ntk"`` at infinite width.

    Notes
    -----
    At finite width compile time does not grow with the depth. At infinite width every step
    evaluates two kernels and their derivatives. More than seven layers need float64: in float32 the
    bound of their error makes entries NaN, and the search stops with a message. Use
    ``bilevel.hypergradient(..., diagnostics=False)``: second derivatives of a kernel take minutes.

    Examples
    --------
    >>> space = skip_space(["relu", "tanh"], depth=3, width=4, classes=2)
    >>> alpha = space.start() | {"skips": jnp.array([0.6])}
    >>> architecture = space.discretize(alpha)
    >>> print(architecture)
    relu, relu+skip

    At infinite width a search has no weights to train:

    >>> kernels = skip_space(["relu", "tanh"], depth=3, width=math.inf)
    >>> alpha = kernels.one_hot(architecture)
    >>> alpha["kernel"]["skips"], str(kernels.discretize(alpha))
    (Array([1.], dtype=float...), 'relu, relu+skip')

    Algorithm 1 trains the network of an architecture::

        w, train = space.init(key, (x, labels)), bilevel.nets.train
        trained = train(key, space.problem.lower, architecture, w, (x, labels), optimizer=0.01)
        space.apply(trained.uniform, architecture, x_test)
    """
    activations = sequence("activations", activations)
    functions = tuple(_ntk_activation(a) for a in activations)
    names = tuple(s.name if isinstance(s, Activation) else s for s in activations)
    if not 0 < len(functions) == len(set(functions)) == len(set(names)):
        got = ", ".join(names) or "none"
        raise ValueError(f"activations: expected at least one, each once, got {got}.")
    integer("depth", depth, 3)
    integer("classes", classes, 2)
    one_of("parametrization", parametrization, _SCALES)
    infinite = width == math.inf
    if infinite and parametrization != "ntk":
        raise ValueError(
            f'parametrization: expected "ntk" at infinite width, got {parametrization!r}.'
        )
    one_of("outer", outer, OUTER_LOSSES)
    if not infinite and outer != "logistic":
        raise ValueError(f'outer: expected "logistic" at finite width, got {outer!r}.')
    width = 1 if infinite else integer("width", width, 1)
    outputs = 1 if classes == 2 else classes
    candidates = dict(zip(names, functions, strict=True))
    network = _SkipNetwork(candidates, depth, width, outputs, parametrization)
    mixtures = on_simplices(names, (depth - 1,))

    def init(key, batch):
        return network.init(key, batch[0].shape[-1], method="weights")["params"]

    def start():
        skips = jnp.full(depth - 2, 0.5, jnp.result_type(float))
        return {"activations": mixtures.start(), "skips": skips}

    def draw(key):
        keys = jax.random.split(key)
        present = jax.random.bernoulli(keys[1], shape=(depth - 2,))
        skips = present.astype(jnp.result_type(float))
        return {"activations": mixtures.draw(keys[0]), "skips": skips}

    def apply(w, alpha, x):
        inputs = w["first"].shape[0]
        if jnp.ndim(x) != 2 or x.shape[1] != inputs:
            raise ValueError(f"x: expected rows [n, {inputs}], got shape {jnp.shape(x)}.")
        return network.apply({"params": w}, alpha, x)

    def discretize(alpha):
        network.check(alpha)
        skips = np.asarray(alpha["skips"])
        check_finite("alpha", skips, "weights")
        chosen = mixtures.discretize(alpha["activations"])
        return SkipArchitecture(chosen, tuple((skips > 0.5).tolist()))

    def one_hot(architecture):
        network.check(architecture)
        skips = jnp.asarray(architecture.skips, float)
        return {"activations": mixtures.one_hot(architecture.activations), "skips": skips}

    def kernel(alpha, x, x2=None):
        network.check(alpha)
        layers: list[Any]
        if isinstance(alpha, SkipArchitecture):
            layers, skips = [network.activations[name] for name in alpha.activations], alpha.skips
        else:
            layers = [dict(zip(functions, p, strict=True)) for p in alpha["activations"]]
            skips = alpha["skips"]
        return ntk.network_kernel(x, x2, activations=layers, skips=skips)

    space = SkipSpace(
        names=names,
        sets={"activations": "simplex", "skips": "box"},
        start=start,
        init=init,
        apply=apply,
        problem=cross_entropy_problem(apply),
        predict=predict_labels,
        draw=draw,
        discretize=discretize,
        one_hot=one_hot,
        kernel=kernel,
    )
    if infinite:
        return kernel_search(space, kernel, outer, SkipKernelSpace, kernel=kernel)
    return space


def _ntk_activation(a: str | Activation) -> Activation:
    if isinstance(a, Activation):
        return a
    if not isinstance(a, str) or a not in ACTIVATIONS:
        raise ValueError(
            f"activations: expected names among {', '.join(ACTIVATIONS)}, "
            f"or ntk.activation(function), got {a!r}."
        )
    return ACTIVATIONS[a]


_SCALES: dict[str, Callable[[int], tuple[float, float]]] = {
    "ntk": lambda width: (1.0, math.sqrt(2 / width)),
    "as_printed": lambda width: (math.sqrt(1 / width), 1.0),
    "he": lambda width: (math.sqrt(2 / width), 1.0),
}
"""Standard deviation of the weights, and their factor from the second layer on."""


class _SkipNetwork(nn.Module):
    """Eq. (1), for a mixture in every layer or for one architecture."""

    activations: dict[str, Activation]
    depth: int
    width: int
    outputs: int
    parametrization: str

    @nn.compact
    def weights(self, inputs: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        m = self.width
        deviation, _ = _SCALES[self.parametrization](m)

        def normal(key, shape):
            return deviation * jax.random.normal(key, shape)

        first = self.param("first", normal, (inputs, m))
        hidden = self.param("hidden", normal, (self.depth - 2, m, m))
        return first, hidden, self.param("last", normal, (m, self.outputs))

    def __call__(self, alpha: Alpha | SkipArchitecture, x: jax.Array) -> jax.Array:
        self.check(alpha)
        first, hidden, last = self.weights(x.shape[1])
        _, gain = _SCALES[self.parametrization](self.width)
        run: Any = self.plain if isinstance(alpha, SkipArchitecture) else self.mixed
        f = gain * run(alpha, x @ first, hidden, gain) @ last
        return f[:, 0] if self.outputs == 1 else f

    def mixed(self, alpha: Alpha, u: jax.Array, hidden: jax.Array, gain: float) -> jax.Array:
        def mixture(p, u):
            return sum(p[i] * s(u) for i, s in enumerate(self.activations.values()))

        def layer(f, inputs):
            p, a, w = inputs
            return mixture(p, gain * f @ w) + a * f, None

        first, *above = alpha["activations"][0], alpha["activations"][1:], alpha["skips"], hidden
        return jax.lax.scan(layer, mixture(first, u), above)[0]

    def plain(
        self, architecture: SkipArchitecture, u: jax.Array, hidden: jax.Array, gain: float
    ) -> jax.Array:
        s, *above = [self.activations[name] for name in architecture.activations]
        f = s(u)
        for s, skip, w in zip(above, architecture.skips, jnp.unstack(hidden), strict=True):
            u = s(gain * f @ w)
            f = u + f if skip else u
        return f

    def check(self, alpha: Alpha | SkipArchitecture) -> None:
        """Raise unless ``alpha`` belongs to this network."""
        shapes: Any
        expected: Any = (self.depth - 1,), (self.depth - 2,)
        if isinstance(alpha, SkipArchitecture):
            unknown = set(alpha.activations) - set(self.activations)
            if unknown:
                known = ", ".join(self.activations)
                raise ValueError(f"alpha: expected activations among {known}, got {min(unknown)}.")
            shapes = (len(alpha.activations),), (len(alpha.skips),)
        else:
            expected = (self.depth - 1, len(self.activations)), (self.depth - 2,)
            shapes = jnp.shape(alpha["activations"]), jnp.shape(alpha["skips"])
        if shapes != expected:
            raise ValueError(
                f"alpha: expected activations and skips of shapes {expected}, got {shapes}."
            )
