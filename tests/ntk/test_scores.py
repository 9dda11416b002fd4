"""Check ntk.scores against numpy loops, with hand-derived gradients of a small network."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from generated import examples, seeds
from helpers import assert_close, flatten, long_except
from hypothesis import assume, example, given
from jax.ad_checkpoint import checkpoint_name

from ntk import empirical_kernel, scores
from ntk.scores.kernel_based import kernel_scores
from ntk.scores.registry import builtin_score_names, score_description

N, INPUTS, HIDDEN, CLASSES = 6, 9, 7, 3


def apply(params, x):
    hidden = jax.nn.relu(x @ params["a"]["kernel"] + params["a"]["bias"])
    return hidden @ params["b"]["kernel"] + params["b"]["bias"]


def draw(seed=0, bias=0.3):
    rng = np.random.default_rng(seed)

    def layer(*shape):
        kernel, shift = rng.normal(size=shape), rng.normal(size=shape[1])
        return {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias * shift)}

    params = {"a": layer(INPUTS, HIDDEN), "b": layer(HIDDEN, CLASSES)}
    return params, (jnp.asarray(rng.normal(size=(N, INPUTS))), jnp.array([0, 1, 2, 0, 1, 2]))


@functools.partial(jax.jit, static_argnums=(0, 3))
def score(name, params, batch, apply=apply, **options):
    return getattr(scores, name)(None, apply, params, batch, **options)


def kernels(tree):
    return [tree["a"]["kernel"], tree["b"]["kernel"]]


class ByHand:
    """The same network in float64 numpy, one sample at a time."""

    condition = 1.0  # of the matrix in a score that is a log-determinant

    def __init__(self, params, batch):
        self.p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
        self.x, self.y = np.asarray(batch[0], np.float64), np.asarray(batch[1])

    def forward(self, x):
        z = x @ self.p["a"]["kernel"] + self.p["a"]["bias"]
        return z, np.maximum(z, 0) @ self.p["b"]["kernel"] + self.p["b"]["bias"]

    def gradient(self, i, pulled):
        """The gradient of ``pulled @ logits`` of sample i."""
        z, _ = self.forward(self.x[i])
        down = (self.p["b"]["kernel"] @ pulled) * (z > 0)
        return {
            "a": {"kernel": np.outer(self.x[i], down), "bias": down},
            "b": {"kernel": np.outer(np.maximum(z, 0), pulled), "bias": pulled},
        }

    def residual(self, i):
        _, logits = self.forward(self.x[i])
        p = np.exp(logits - logits.max())
        return p / p.sum() - np.eye(CLASSES)[self.y[i]]

    def loss_gradients(self):
        return [self.gradient(i, self.residual(i)) for i in range(len(self.x))]

    def mean_gradient(self, samples=slice(None)):
        gradients = self.loss_gradients()[samples]
        return jax.tree.map(lambda *leaves: np.mean(leaves, axis=0), *gradients)

    def kernel(self, leaves=jax.tree.leaves):
        """The tangent kernel of the summed logits in these leaves."""
        gradients = [self.gradient(i, np.ones(CLASSES)) for i in range(len(self.x))]
        rows = np.array([flatten(leaves(g)) for g in gradients])
        return rows @ rows.T

    def eigen_nas(self):
        return np.trace(self.kernel()) / N

    def min_eigenvalue(self):
        return np.linalg.eigvalsh(self.kernel())[0]

    def cosine_min_eigenvalue(self):
        K = self.kernel()
        return np.linalg.eigvalsh(K / np.sqrt(np.outer(np.diag(K), np.diag(K))))[0]

    def condition_number(self, leaves=jax.tree.leaves):
        values = np.linalg.eigvalsh(self.kernel(leaves))
        return values[-1] / values[0]

    def te_nas(self):
        return self.condition_number(kernels)

    def spectral_entropy(self):
        values = np.linalg.eigvalsh(self.kernel())
        p = values / values.sum()
        return -np.sum(p * np.log(p))

    def label_energy(self):
        targets = np.eye(CLASSES)[self.y]
        targets = targets - targets.mean(0)
        return -np.trace(targets.T @ np.linalg.solve(self.kernel(), targets))

    def log_traces(self):
        traces = [np.trace(self.kernel(lambda g, i=i: [kernels(g)[i]])) / N for i in (0, 1)]
        return np.sum(np.log(traces))

    def knas(self):
        g = [flatten(g) for g in self.loss_gradients()]
        return sum(u @ v for u in g for v in g) / N**2

    def knas_released(self):
        # Only the first kernel, of 63 entries, has 50.
        g, total = [g["a"]["kernel"].ravel() for g in self.loss_gradients()], 0.0
        for i in range(50):
            first = np.array([g[k][i] for k in range(N // 2)])
            second = np.array([g[k][i] for k in range(N // 2, N)])
            total += np.dot(first - first.mean(), second - second.mean()) / N**2
        return total

    def nasi(self):
        r = sum(np.sum(leaf**2) for leaf in jax.tree.leaves(self.mean_gradient()))
        return r - 2 * max(0, r - 500)

    def grad_norm(self):
        return sum(np.sqrt(np.sum(g**2)) for g in kernels(self.mean_gradient()))

    def snip(self):
        pairs = zip(kernels(self.p), kernels(self.mean_gradient()), strict=True)
        return sum(np.abs(w * g).sum() for w, g in pairs)

    def grasp(self):
        # The Hessian product by central differences: no ReLU changes sign on the way.
        start, g, h = kernels(self.p), kernels(self.mean_gradient()), 1e-5

        def moved(t):
            for name, w, d in zip("ab", start, g, strict=True):
                self.p[name]["kernel"] = w + t * d
            return kernels(self.mean_gradient())

        product = [(u - v) / (2 * h) for u, v in zip(moved(h), moved(-h), strict=True)]
        return -sum(np.sum(w * hg) for w, hg in zip(start, product, strict=True))

    def fisher(self):
        total = 0.0
        for layer in "ab":
            terms = np.array([
                (np.maximum(self.forward(x)[0], 0) if layer == "b" else x)
                @ self.p[layer]["kernel"] * g[layer]["bias"] / N
                for x, g in zip(self.x, self.loss_gradients(), strict=True)
            ])  # fmt: skip
            total += 0.5 * np.sum(np.mean(terms**2, axis=0))
        return total

    def zico(self):
        halves = [kernels(self.mean_gradient(half)) for half in (slice(0, 3), slice(3, 6))]
        total = 0.0
        for layer in zip(*halves, strict=True):
            deviation, mean = np.std(layer, axis=0), np.mean(np.abs(layer), axis=0)
            total += np.log(np.sum(mean[deviation != 0] / deviation[deviation != 0]))
        return total

    def jacov(self):
        def input_gradient(x):
            z, _ = self.forward(x)
            return self.p["a"]["kernel"] @ (self.p["b"]["kernel"].sum(1) * (z > 0))

        values = np.linalg.eigvalsh(np.corrcoef([input_gradient(x) for x in self.x]))
        return -np.sum(np.log(values + 1e-5) + 1 / (values + 1e-5))

    def synflow(self):
        # R = sum_j h_j v_j + ..., h_j = sum_i |w_ij| + |b_j|, v_j = sum_c |u_jc|: all positive.
        (w, u), b = map(np.abs, kernels(self.p)), np.abs(self.p["a"]["bias"])
        v = u.sum(1)
        return np.log(np.sum(w * v) + np.sum((w.sum(0) + b) * v))

    def log_determinant(self, matrix):
        self.condition = np.linalg.cond(matrix)
        return np.linalg.slogdet(matrix)[1]

    def naswot(self):
        on = np.array([self.forward(x)[0] > 0 for x in self.x])
        agreements = np.array([[np.sum(p == q) for q in on] for p in on])
        return self.log_determinant(agreements)

    def regions(self):
        return len({tuple(self.forward(x)[0] > 0) for x in self.x})

    def wrcor(self):
        z = [self.forward(x)[0] for x in self.x]
        down = [g["a"]["bias"] for g in self.loss_gradients()]
        return self.log_determinant(abs(np.corrcoef(z)) + abs(np.corrcoef(down)))

    def l2_norm(self):
        return sum(np.sqrt(np.sum(w**2)) for w in kernels(self.p))


OF_KERNEL = {
    name for name in builtin_score_names() if score_description(name).together == "kernel_scores"
}
# The other scores of the kernel are read from `kernel_scores`.
ALL = sorted({*builtin_score_names()} - OF_KERNEL | {"eigen_nas", "min_eigenvalue"})


def test_scores_of_the_kernel_at_once_are_those_one_by_one():
    params, batch = draw()
    together = jax.jit(functools.partial(kernel_scores, None, apply))(params, batch)
    assert set(together) == {"kernel", *OF_KERNEL}
    expected = {name: getattr(ByHand(params, batch), name)() for name in OF_KERNEL}
    for name in OF_KERNEL:
        assert_close(together[name], expected[name], f64=1e-8)
    for name in ("eigen_nas", "min_eigenvalue", "label_energy"):
        assert_close(score(name, params, batch), expected[name], f64=1e-8)
    assert_close(together["kernel"], empirical_kernel(apply, params, batch[0]))


@pytest.mark.long
@pytest.mark.parametrize("dead", ["network", "equal samples"])
def test_a_singular_kernel_has_defined_scores_and_none_that_ranks_first(dead):
    params, (x, y) = draw()
    if dead == "network":
        params = jax.tree.map(jnp.zeros_like, params)

    def without_biases(p, x):
        return jnp.tanh(x @ p["a"]["kernel"]) @ p["b"]["kernel"]

    together = kernel_scores(None, without_biases, params, (jnp.ones_like(x), y))
    assert not any(np.isnan(np.asarray(value)).any() for value in together.values())
    # A zero eigenvalue is rounded relative to the kernel's trace.
    least = 1e-6 * float(jnp.trace(together["kernel"]))
    assert together["min_eigenvalue"] <= least and together["cosine_min_eigenvalue"] <= 1e-6
    assert together["condition_number"] == np.inf and together["label_energy"] == -np.inf
    assert together["spectral_entropy"] <= 1e-4


def test_a_traced_indefinite_kernel_gives_nan():
    K = jnp.array([[1.0, 3.0], [3.0, 1.0]])
    assert jnp.isnan(jax.jit(scores.of_kernel)(K)["min_eigenvalue"])


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
@examples(1)
@given(seed=seeds)
@example(seed=0)
def test_score_is_what_loops_over_hand_made_gradients_give(name, seed):
    params, batch = draw(seed)
    net = ByHand(params, batch)
    active = np.array([net.forward(x)[0] > 0 for x in net.x])
    # Without equal sign patterns and dead samples no score has a logarithm or a quotient of 0.
    assume(len(np.unique(active, axis=0)) == N and active.any(1).all())
    with np.errstate(divide="raise", invalid="raise"):
        expected = getattr(net, name)()
    rounding = 10 * np.finfo(float).eps * net.condition
    assume(rounding < 1e-4)  # else the matrix is singular to rounding
    f64 = 1e-6 if name == "grasp" else 1e-9  # its reference is a finite difference
    assert_close(score(name, params, batch), expected, f64=f64 + rounding, f32=1e-3)


@pytest.mark.long
@pytest.mark.parametrize("name", ALL)
def test_score_under_jit_and_vmap_over_weights_is_the_score_of_each(name):
    (p, batch), (q, _) = draw(0), draw(1)
    pair = jax.tree.map(lambda *leaves: jnp.stack(leaves), p, q)
    together = jax.vmap(lambda params: score(name, params, batch))(pair)
    assert together.shape == (2,)
    # te_nas divides by a small eigenvalue.
    assert_close(together, jnp.stack([score(name, r, batch) for r in (p, q)]), f32=2e-3)


@pytest.mark.parametrize("name", ["regions", "wrcor"])
def test_a_nan_among_traced_inputs_is_not_passed_over(name):
    params, (x, y) = draw()
    assert np.isnan(score(name, params, (x.at[0, 0].set(jnp.nan), y)))


def test_nasi_is_penalised_above_its_threshold_only():
    params, batch = draw()
    r = score("nasi", params, batch, threshold=np.inf)
    assert_close(score("nasi", params, batch, penalty=3.0, threshold=r / 2), r - 1.5 * r)
    assert_close(score("nasi", params, batch, penalty=3.0, threshold=2 * r), r)


def test_wrcor_weighs_layers_by_powers_of_two_which_end_where_they_are_named():
    # Three ReLUs; their gradients are taken at shifts of their inputs.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 16)))
    W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 16, 16)))
    y = jnp.arange(4)

    def network(W, x, ends=(), shifts=(0, 0, 0)):
        seen = []
        for i, (w, shift) in enumerate(zip(W, shifts, strict=True)):
            seen.append(x @ w + shift)
            x = jax.nn.relu(seen[-1])
            x = checkpoint_name(x, "layer") if i in ends else x
        return x, seen

    def loss(shifts):
        logits, _ = network(W, x, (), shifts)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    down = jax.grad(loss)([jnp.zeros((4, 16))] * 3)
    pairs = zip(network(W, x)[1], down, strict=True)
    correlations = [abs(np.corrcoef(a)) + abs(np.corrcoef(b)) for a, b in pairs]
    for ends, layers in {(): (0, 1, 2), (1,): (0, 0, 1), (0, 2): (0, 1, 1)}.items():
        K = sum(2.0**layer * matrix for layer, matrix in zip(layers, correlations, strict=True))
        value = score("wrcor", W, (x, y), lambda W, x, ends=ends: network(W, x, ends)[0])
        assert_close(value, np.linalg.slogdet(K)[1], f32=1e-3)


def test_wrcor_leaves_out_what_has_no_correlations_and_sees_small_gradients():
    params, (x, y) = draw(bias=0.0)
    z = [ByHand(params, (x, y)).forward(row)[0] for row in np.asarray(x)]

    def of_multiple(factor):
        last = jax.tree.map(lambda leaf: factor * leaf, params["b"])
        return score("wrcor", {**params, "b": last}, (x, y))

    # Logits near 0 have the softmax's residuals at 0, whatever the factor.
    assert_close(of_multiple(1e-25), of_multiple(1e-7), f64=1e-5)
    alone = np.linalg.slogdet(abs(np.corrcoef(z)))[1]  # no gradient at the ReLU
    assert_close(of_multiple(0.0), alone)
    assert score("wrcor", params, (x.at[1].set(x[0]), y.at[1].set(y[0]))) == -np.inf


def test_wrcor_leaves_out_inputs_of_a_relu_if_one_sample_is_constant():
    rng = np.random.default_rng(0)
    a, b = (jnp.asarray(rng.normal(size=shape)) for shape in ((5, 6), (6, 3)))
    x, y = jnp.asarray(rng.normal(size=(3, 5))).at[1].set(0), jnp.arange(3)

    def network(w, x, shift=0):
        return jax.nn.relu(x @ w[0] + 1 + shift) @ w[1]

    def loss(shift):
        return optax.softmax_cross_entropy_with_integer_labels(network((a, b), x, shift), y).mean()

    @jax.jit
    def value(x):
        return score("wrcor", (a, b), (x, y), network)

    gradients = jax.grad(loss)(jnp.zeros((3, 6)))
    assert_close(value(x), np.linalg.slogdet(abs(np.corrcoef(gradients)))[1])
    assert np.isnan(value(x.at[0, 0].set(np.nan)))


def test_jacov_keeps_eigenvalues_below_float32s_rounding():
    gains = jnp.array([[1.0, 1.001], [1.001, 1.0], [1.0, 1.002]])
    batch = jnp.eye(3), jnp.array([0, 1, 0])
    # All inputs share the gradient (2.001, 2.001, 2.002) summed over logits: eigenvalues 3, 0, 0.
    expected = -(np.log(3 + 1e-5) + 1 / (3 + 1e-5) + 2 * (np.log(1e-5) + 1e5))
    assert_close(score("jacov", jnp.eye(2), batch, lambda w, x: x @ gains @ w), expected, f32=1e-4)


@pytest.mark.parametrize("name", ALL)
def test_a_dead_network_never_scores_nan(name):
    params, batch = draw()
    dead = jax.tree.map(jnp.zeros_like, params)
    value = score(name, dead, batch)
    assert not np.isnan(value)
    if name in ("naswot", "synflow", "wrcor"):
        assert value == -np.inf
    if name == "te_nas":
        assert value == np.inf


class Convolutions(nn.Module):
    """Batch statistics, a bias, and a branch that leads nowhere."""

    @nn.compact
    def __call__(self, x, gains=(1.0, 1.0)):
        x = nn.Conv(3, (3, 3), use_bias=False, name="first")(x) * gains[0]
        x = nn.relu(nn.BatchNorm(use_running_average=False)(x))
        self.sow("branch", "nowhere", nn.relu(nn.Conv(2, (1, 1))(x)))
        return nn.Dense(CLASSES)(x.mean((1, 2))) * gains[1]


def convolutions(params, x, gains=(1.0, 1.0)):
    return Convolutions().apply({"params": params}, x, gains, mutable=["batch_stats", "branch"])[0]


@pytest.fixture(scope="module")
def images():
    x = jax.random.normal(jax.random.key(0), (4, 5, 5, 2))
    params = jax.jit(Convolutions().init)(jax.random.key(1), x)["params"]
    params = jax.tree.map(lambda leaf: leaf.astype(x.dtype), params)
    return params, (x, jnp.array([0, 1, 2, 0]))


@pytest.mark.long
def test_te_nas_differentiates_through_the_batchs_statistics(images):
    # Against the dense Jacobian of the whole batch, kernels and scales only.
    params, batch = images
    jacobian = jax.jit(jax.jacrev(lambda p: convolutions(p, batch[0]).sum(1)))(params)
    leaves = jax.tree_util.tree_leaves_with_path(jacobian)
    chosen = [leaf for path, leaf in leaves if path[-1].key in ("kernel", "scale")]
    rows = np.concatenate([np.asarray(x, np.float64).reshape(4, -1) for x in chosen], axis=1)
    values = np.linalg.eigvalsh(rows @ rows.T)
    assert_close(score("te_nas", params, batch, convolutions), values[-1] / values[0], f64=1e-7)


def test_eigen_nas_takes_the_statistics_of_each_sample_alone(images):
    params, (x, y) = images
    samples = [(x[i : i + 1], y[i : i + 1]) for i in range(4)]
    alone = [score("eigen_nas", params, sample, convolutions) for sample in samples]
    assert_close(score("eigen_nas", params, (x, y), convolutions), jnp.mean(jnp.stack(alone)))


def test_fisher_is_the_gradient_in_a_gain_per_sample_and_channel(images):
    # a * dL/da summed over positions is the derivative in a factor on a. The bias is 0 here.
    params, (x, y) = images

    def loss(gains):
        return -jnp.mean(jax.nn.log_softmax(convolutions(params, x, gains))[jnp.arange(4), y])

    g = jax.jit(jax.grad(loss))((jnp.ones((4, 1, 1, 3)), jnp.ones((4, CLASSES))))
    expected = sum(0.5 * jnp.sum(jnp.mean(leaf**2, axis=0)) for leaf in g)
    assert_close(score("fisher", params, (x, y), convolutions), expected)


def stacked(seed=0):
    rng = np.random.default_rng(seed)
    layers = jnp.asarray(rng.normal(size=(2, 5, 5)))
    return layers, (jnp.asarray(rng.normal(size=(4, 5))), jnp.array([0, 1, 2, 3]))


def plain(layers, x):
    for w in layers:
        x = jax.nn.relu(x @ w)
    return x


@jax.custom_vjp
def ruled(w, x):
    return jax.nn.relu(x @ w)


ruled.defvjp(
    lambda w, x: (ruled(w, x), (w, x)), lambda saved, g: jax.vjp(lambda w, x: x @ w, *saved)[1](g)
)


def branch(index, w, x):
    return jax.lax.switch(index, [lambda w, x: x, lambda w, x: jax.nn.relu(x @ w)], w, x)


FORMS = {
    "remat": lambda layers, x: jax.checkpoint(plain)(layers, x),
    "vmap": lambda layers, x: jax.vmap(plain, (None, 0))(layers, x),
    "scan": lambda layers, x: jax.lax.scan(lambda h, w: (jax.nn.relu(h @ w), None), x, layers)[0],
    "scan with stacked output": lambda layers, x: jax.lax.scan(
        lambda h, w: (jax.nn.relu(h @ w),) * 2, x, layers
    )[1][-1],
    "custom rule": lambda layers, x: ruled(layers[1], ruled(layers[0], x)),
    "switch": lambda layers, x: branch(1, layers[1], branch(jnp.array(1), layers[0], x)),
    "with an idle branch": lambda layers, x: branch(jnp.array(0), layers[0], plain(layers, x)),
    "with a dropped output": lambda layers, x: jax.jit(
        lambda layers, x: (plain(layers, x), jax.nn.relu(x))
    )(layers, x)[0],
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["naswot", "wrcor", "fisher"])
def test_relus_and_layers_are_found_in_calls_loops_and_branches(name, form):
    layers, batch = stacked()
    assert_close(score(name, layers, batch, FORMS[form]), score(name, layers, batch, plain))


@pytest.mark.long
def test_one_compiled_score_follows_a_genotype_given_as_an_array():
    layers, batch = stacked()

    @jax.jit
    @jax.vmap
    def genotype_scores(genotype):
        def network(layers, x):
            step = lambda h, at: (branch(at[0], at[1], h), None)  # noqa: E731
            return jax.nn.relu(jax.lax.scan(step, x, (genotype, layers))[0])

        return jnp.stack([score(name, layers, batch, network) for name in ("naswot", "fisher")])

    concrete = jax.jit(lambda layers, x: jax.nn.relu(plain(layers, x)))
    rows = genotype_scores(jnp.array([[1, 1], [0, 1]]))
    for genotype, row in zip([[0, 1], [1]], rows, strict=True):
        chosen = layers[jnp.array(genotype)]
        expected = [score(name, chosen, batch, concrete) for name in ("naswot", "fisher")]
        assert_close(row, jnp.stack(expected))


MAPPED = ["eigen_nas", "label_energy", "knas", "knas_released", "te_nas", "zico"]


@pytest.mark.long
@pytest.mark.parametrize("name", MAPPED)
def test_a_second_eager_call_compiles_nothing(name, caplog):
    """Whatever the object is that applies the network."""
    w, score = jax.random.normal(jax.random.key(0), (60, 4)), getattr(scores, name)
    batch = jax.random.normal(jax.random.key(1), (8, 60)), jnp.arange(8) % 4

    def compute(scale):
        return score(jax.random.key(2), lambda w, x: jnp.tanh(x @ w), scale * w, batch)

    first = compute(1.0)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        again, other = compute(1.0), compute(2.0)
        assert not [r for r in caplog.messages if r.startswith("Finished XLA compilation")]
        jnp.cosh(jnp.arange(13.0) + w[0, 0])  # the log is where it is looked for
        jax.jit(lambda x: jnp.cosh(x) * 13)(w)
        assert [r for r in caplog.messages if r.startswith("Finished XLA compilation")]
    assert again == first != other


@pytest.mark.long
def test_regions_can_leave_out_relus_that_nothing_depends_on():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((20, 2)))
    directions = jnp.asarray(np.random.default_rng(1).standard_normal((2, 10)))
    batch = x, jnp.zeros(20, int)

    def regions(gate, unused):
        def network(w, x):
            branches = gate * jax.nn.relu(x @ directions), jax.nn.relu(x[:, :1])
            return jnp.concatenate(branches, 1) @ w

        return float(scores.regions(None, network, jnp.ones((11, 3)), batch, unused=unused))

    every, used = ([regions(gate, unused) for gate in (0.0, 1e-9)] for unused in (True, False))
    patterns = np.asarray(x @ directions > 0)
    many = len(np.unique(np.column_stack([patterns, x[:, 0] > 0]), axis=0))
    assert every == [many, many] and used == [2, many] and many > 5


@pytest.mark.parametrize(
    "name", long_except(["log_traces"], ["log_traces", "eigen_nas", "knas_released"])
)
def test_running_averages_are_no_weights(name):
    """Truth: the same score of "params" alone. Averages are first in JAX's order."""
    norm = functools.partial(nn.BatchNorm, use_running_average=True)
    hidden = [layer for _ in range(6) for layer in (nn.Dense(50), norm(), nn.relu)]
    model, x = nn.Sequential([*hidden, nn.Dense(2)]), jax.random.normal(jax.random.key(0), (4, 3))
    variables, batch = model.init(jax.random.key(1), x), (x, jnp.array([0, 1, 0, 1]))
    variables["batch_stats"] = jax.tree.map(lambda a: a / 4, variables["batch_stats"])
    score = getattr(scores, name)

    def of_params(p, x):
        return model.apply({**variables, "params": p}, x)

    expected = score(None, of_params, variables["params"], batch)
    assert float(expected) != 0
    assert_close(score(None, model.apply, variables, batch), expected, f32=1e-5)


def test_scales_of_an_nnx_state_have_their_names():
    from flax import nnx

    rngs = nnx.Rngs(0)
    first, last = nnx.Linear(3, 5, rngs=rngs), nnx.Linear(5, 2, rngs=rngs)
    graph, state = nnx.split(nnx.Sequential(first, nnx.LayerNorm(5, rngs=rngs), nnx.relu, last))
    batch = jax.random.normal(jax.random.key(0), (4, 3)), jnp.array([0, 1, 0, 1])

    def apply(state, x):
        return nnx.merge(graph, state)(x)

    plain = nnx.to_pure_dict(state)

    def of_plain(plain, x):
        return apply(jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(plain)), x)

    value = scores.te_nas(None, apply, state, batch)
    assert_close(value, scores.te_nas(None, of_plain, plain, batch), f32=1e-4)


@pytest.mark.parametrize("name", ["snip", "knas", "zico", "label_energy"])
def test_labels_that_no_check_sees_make_nan(name):
    x = jax.random.normal(jax.random.key(0), (4, 5))
    w, y = jax.random.normal(jax.random.key(1), (5, 3)), jnp.array([0, 1, 2, 0])
    score = jax.jit(lambda y: getattr(scores, name)(None, lambda w, x: x @ w, w, (x, y)))
    assert jnp.isfinite(score(y))
    assert jnp.isnan(score(y + 1)) and jnp.isnan(score(y - 1))


def test_whole_numbers_among_the_parameters_are_no_matter():
    x, y = jax.random.normal(jax.random.key(0), (4, 5)), jnp.array([0, 1, 2, 0])
    kernel = {"kernel": jax.random.normal(jax.random.key(1), (5, 3))}
    for name in ("knas", "eigen_nas", "snip", "te_nas"):
        score = functools.partial(getattr(scores, name), None, lambda w, x: x @ w["kernel"])
        assert_close(score(kernel | {"count": jnp.arange(3)}, (x, y)), score(kernel, (x, y)))


@pytest.mark.long
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_singular_kernel_of_16_bits_has_no_condition_number(dtype):
    y = jnp.array([0, 1, 0])
    for seed in range(3):
        x = jax.random.normal(jax.random.key(seed), (3, 2)).astype(dtype)  # of rank 2
        args = None, lambda w, x: x @ w, jnp.ones((2, 2), dtype), (x, y)
        assert scores.condition_number(*args) == jnp.inf
        assert scores.label_energy(*args) == -jnp.inf
