"""Test a user's layer, one class with its kernel, finite network and entry of ``alpha``."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers import assert_close, normal

import ntk
from ntk import networks as nets
from ntk.expectations.gaussian import reciprocal
from ntk.networks.contracts import Layer, LayerStep, Planned
from ntk.networks.moments import LayerFeatures, Moments, epsilon
from ntk.networks.position_pairs import norm_noise
from ntk.networks.windows import outer

RELU = nets.act(ntk.relu)


@dataclasses.dataclass(frozen=True)
class Normalization(Layer, LayerStep):
    """``gain f / |f|``, with |f| the root mean square over the channels of each position.

    At infinite width |f| is the root s of the second moment. Angles stay; T is divided by s s'.
    """

    gain: Any = None  # unused in the step

    combinator = "normalize"

    def plan(self, signal, values):
        if signal.raw:
            raise ValueError("normalize: expected a layer with weights before it, got the data.")
        return Planned(Normalization(), values.number("gain", self.gain), signal)

    def entries(self):
        return [(self.gain, None)]

    def features(self, gain, before):
        factor = jnp.abs(gain) * reciprocal(before.norm)
        after = Moments(
            jnp.where(before.square > 0, gain**2, 0),
            factor**2 * before.tangent,
            gain * reciprocal(before.norm) * before.mean,
            before.noise + 8 * epsilon(factor),
            factor.max(1) * (before.mean_noise + jnp.abs(before.mean).max(1) * before.noise),
        )
        return LayerFeatures(before, after)

    def pairs(self, gain, a, b, state, tile):
        over = [reciprocal(side.before.norm) for side in (a, b)]
        largest = over[0].max(1)[:, None] * over[1].max(1)[None]
        rounding = norm_noise(a.before, b.before) + 8 * epsilon(state.p)
        return state._replace(
            tangent=gain**2 * outer(*over, tile.full) * state.tangent,
            second_error=state.second_error + rounding,
            tangent_error=state.tangent_error + rounding,
            tangent_excess=jax.lax.stop_gradient(gain**2 * largest * state.tangent_excess),
        )

    def apply(self, gain, x, finite):
        return gain * x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True))


def normalize(gain=1.0):
    return nets.Network((Normalization(gain),))


@pytest.mark.slow
def test_its_kernel_is_the_closed_form():
    x, y = normal(0, 4, 3), normal(1, 2, 3)
    below = nets.serial(nets.dense(2.0, 0.1), RELU)
    net = nets.serial(below, normalize("gain"), nets.dense(1.5, 0.2))
    assert net.names == {"gain": ()}
    # dense(1.0) turns S and T of the features into S and S + T.
    plain = nets.serial(below, nets.dense())
    for pair in ((x, None), (x, y)):
        kernels, with_gain = plain.kernel(*pair), net.kernel(*pair, alpha={"gain": 0.7})
        other = x if pair[1] is None else y
        s1, s2 = (jnp.sqrt(jnp.diag(plain.kernel(z).nngp)) for z in (x, other))
        share = 0.49 / jnp.outer(s1, s2)
        nngp = 1.5 * share * kernels.nngp + 0.2
        assert_close(with_gain.nngp, nngp, f64=1e-13, f32=1e-5)
        expected = nngp + 1.5 * share * (kernels.ntk - kernels.nngp)
        assert_close(with_gain.ntk, expected, f64=1e-13, f32=1e-5)


NET = nets.serial(
    nets.conv(2, 2.0, 0.1),
    RELU,
    normalize("gain"),
    nets.residual(nets.serial(nets.conv(2, 1.5), normalize(2.0)), skip=0.5),
    nets.average_pool(2),
    normalize(),
    nets.flatten(),
    nets.dense(1.0, 0.2),
)


@pytest.mark.long
def test_the_mean_kernel_of_wide_networks_with_it_tends_to_the_infinite_one():
    sequences, alpha = normal(0, 3, 4, 2), {"gain": jnp.array(0.7)}
    exact = NET.kernel(sequences, alpha=alpha).ntk
    module = NET.module(width=128)

    def one(key):
        params = module.init(key, sequences, alpha)
        apply = lambda params, x: module.apply(params, x, alpha)  # noqa: E731
        return ntk.empirical_kernel(apply, params, sequences, method="jacobian")

    kernels = jax.jit(lambda keys: jax.lax.map(one, keys))(jax.random.split(jax.random.key(0), 48))
    # Four standard errors of 48 networks, and a bias of some 1 / width.
    off = jnp.abs(jnp.mean(kernels, 0) - exact)
    assert bool(jnp.all(off < 4 * jnp.std(kernels, 0) / 48**0.5 + 2 / 128 * jnp.max(exact)))
