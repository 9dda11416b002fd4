"""Load neural-tangents 0.6.5, its last release, on today's JAX: the only module that imports it.

It imports names that JAX has since moved or dropped, and an experimental module that needs
TensorFlow. During its import, ``jax`` has the missing names, and an empty module replaces the
experimental one. Functions that it calls later are replaced. Its structured derivatives
(implementation 3, and ``AUTO``, which tries every implementation) walk backwards through the linear
program of a network's tangents, one equation at a time. JAX's internals gave this program and its
transposition in 2023; public functions of JAX do so here. Tested on JAX 0.10, 0.11 and 0.12;
`benchmarks/peers/neural_tangents_tests.py` runs its own tests.
"""

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.interpreters import ad
from jax.interpreters.ad import UndefinedPrimal, Zero

from ntk.internal.checks import concrete
from ntk.internal.jaxprs import bind

_INSTALL = (
    "install it with `pip install --no-deps neural-tangents==0.6.5` and `pip install frozendict`."
)
_EXPERIMENTAL = "neural_tangents.experimental"


def _safe_map(function, *lists):
    return [function(*items) for items in zip(*lists, strict=True)]


def _safe_zip(*lists):
    return list(zip(*lists, strict=True))


@contextlib.contextmanager
def _lent(place, names: dict) -> Iterator[None]:
    """Add missing attributes to ``place`` during the block."""
    lent = [name for name in names if not hasattr(place, name)]
    for name in lent:
        setattr(place, name, names[name])
    try:
        yield
    finally:
        for name in lent:
            delattr(place, name)


@contextlib.contextmanager
def _placeholder(name: str, **contents) -> Iterator[types.ModuleType]:
    """Add an empty module of that name during the block, unless one exists."""
    module = types.ModuleType(name)
    module.__dict__.update(contents)
    try:
        yield sys.modules.setdefault(name, module)
    finally:
        if sys.modules.get(name) is module:
            del sys.modules[name]


@cache
def neural_tangents() -> types.ModuleType:
    """Return the package neural-tangents 0.6.5, patched for today's JAX, without TensorFlow.

    It is imported on the first call. Afterwards ``import neural_tangents`` works in this process.

    Returns
    -------
    module
        ``neural_tangents``: ``stax`` (infinite kernels), ``batch``, ``predict``, Monte Carlo and
        empirical kernels, without ``neural_tangents.experimental``. ``jax`` is unchanged.

    Raises
    ------
    ImportError
        If neural-tangents is missing, or its import fails on this version of JAX.

    Notes
    -----
    To install it: ``pip install --no-deps neural-tangents==0.6.5`` and ``pip install frozendict``.
    Its metadata requires TensorFlow, which only the experimental module needs.

    References
    ----------
    Novak et al. (2020), "Neural Tangents"; Novak, Sohl-Dickstein & Schoenholz (2022), "Fast finite
    width neural tangent kernel", for the implementations of empirical kernels.

    Examples
    --------
    >>> nt = neural_tangents()
    >>> from neural_tangents import stax
    >>> _, _, kernel_fn = stax.serial(stax.Dense(1), stax.Relu(), stax.Dense(1))
    >>> kernel_fn(jax.numpy.ones((1, 2)), None, "ntk")
    Array([[1.]], dtype=float...)
    """
    moved = "Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"
    core = {name: getattr(jax.extend.core, name) for name in moved}
    # It is only a key of a table, so a new primitive that no program contains is harmless.
    zeros_like = {"zeros_like_p": jax.extend.core.Primitive("zeros_like")}
    with (
        _placeholder(_EXPERIMENTAL) as experimental,
        _placeholder("jax.util", safe_map=_safe_map, safe_zip=_safe_zip),
        _lent(jax.core, core),
        _lent(ad, zeros_like),
        warnings.catch_warnings(action="ignore", category=DeprecationWarning),
    ):
        try:
            module = importlib.import_module("neural_tangents")
        except ModuleNotFoundError as error:
            raise ImportError(
                f"{error.name}: expected neural-tangents 0.6.5, got none; {_INSTALL}"
            ) from error
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"neural_tangents: expected a version that JAX {jax.__version__} can import, "
                f"got the error {str(error)!r}; {_INSTALL}"
            ) from error
    if getattr(module, "experimental", None) is experimental and _EXPERIMENTAL not in sys.modules:
        del module.experimental
    _apply_patches(module)
    return module


def _apply_patches(module: types.ModuleType) -> None:
    """Replace the functions that no longer work."""
    empirical, predict = module._src.empirical, module._src.predict
    _accept_shapes(empirical)
    empirical._get_primals_out_and_pullback = _pullbacks(empirical)
    empirical._read_primal, empirical._write_cotangent = _value_or_shape, _add_cotangent
    empirical._eqn_vjp_fn, empirical._eqn_jvp_fn = _transpose_equation, _pushed_forward
    empirical._get_flops = _flops
    # neural-tangents also uses a stack of names and this test.
    names = types.SimpleNamespace(transform_name_stack=lambda name: contextlib.nullcontext())
    empirical.ad = types.SimpleNamespace(
        source_info_util=names, is_undefined_primal=ad.is_undefined_primal
    )
    for name in ("_get_cho_solve", "_get_fns_in_eigenbasis"):
        setattr(predict, name, _outside_of_traces(getattr(predict, name)))
    no_context = types.SimpleNamespace(eval_context=contextlib.nullcontext)
    predict.jax = types.SimpleNamespace(core=no_context, default_backend=jax.default_backend)

    def eigvalsh(a, eigvals):
        return scipy.linalg.eigvalsh(a, subset_by_index=eigvals)

    predict.sp = types.SimpleNamespace(linalg=types.SimpleNamespace(eigvalsh=eigvalsh))


def _outside_of_traces(decompose):
    """Compute decompositions that are cached between calls eagerly, unless the kernel is traced."""

    # neural-tangents used jax.core.eval_context, which no longer accepts traced kernels.
    def decomposed(K, *options):
        traced = not concrete(K, options)
        with contextlib.nullcontext() if traced else jax.ensure_compile_time_eval():
            return decompose(K, *options)

    return decomposed


def _accept_shapes(empirical) -> None:
    # neural-tangents passes shapes to functions that now need arrays (broadcast zeros take no
    # memory), and arrays to a function that now needs types.
    basis, axis_and_dtype = empirical._std_basis, empirical._get_fx_axis_and_dtype

    def empty(x):
        return np.broadcast_to(np.zeros((), x.dtype), x.shape)

    def of_types(fx, fx_axis, params):
        return axis_and_dtype(fx, fx_axis, jax.tree.map(lambda x: x.dtype, params))

    empirical._std_basis = lambda tree: basis(jax.tree.map(empty, tree))
    empirical._get_fx_axis_and_dtype = of_types


def _pullbacks(empirical):
    def primals_out_and_pullback(fn, mode, j_rules, s_rules, fwd, *primals):
        tree = jax.tree.structure(primals)
        out, program, constants = _linear_program(fn, primals)
        unknown = [UndefinedPrimal(v.aval) for v in program.invars]
        options = {"consts": constants, "primals_in": unknown, "mode": mode}
        options |= {"_j_rules": j_rules, "_s_rules": s_rules, "_fwd": fwd}

        def pullback(*cotangents):
            leaves = tuple(jax.tree.leaves(cotangents))
            pulled = empirical._backward_pass(program, cotangents_in=leaves, **options)
            return jax.tree.unflatten(tree, pulled)

        return out, pullback

    return primals_out_and_pullback


def _linear_program(fn, primals) -> tuple[Any, types.SimpleNamespace, list]:
    """Return ``fn(*primals)``, the program from tangents to its tangents, and its constants.

    The program has the equations that tangents enter; results of the others become constants.
    """
    with jax.disable_jit():  # calls of compiled functions inside, equation by equation
        out, push_forward = jax.linearize(fn, *primals)
        closed = jax.make_jaxpr(push_forward)(*jax.tree.map(jnp.zeros_like, primals))
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    linear = []
    for eqn in jaxpr.eqns:
        if all(isinstance(v, Literal) or v in known for v in eqn.invars):
            values = [_value_or_shape(known, v) for v in eqn.invars]
            known.update(zip(eqn.outvars, bind(eqn, values), strict=True))
        elif len(eqn.outvars) == 1:
            linear.append(eqn)
        else:
            raise ValueError(
                "implementation: expected 1 or 2 for a network with a step that has several "
                f"results ({eqn.primitive}), got structured derivatives (3, or 0, which tries all)."
            )
    # The attributes of a jaxpr that neural-tangents reads.
    program = types.SimpleNamespace(
        constvars=list(known), invars=list(jaxpr.invars), outvars=list(jaxpr.outvars), eqns=linear
    )
    return out, program, list(known.values())


def _value_or_shape(known, v):
    """Return the value of a literal or a known variable, otherwise its shape."""
    return v.val if isinstance(v, Literal) else known.get(v, UndefinedPrimal(v.aval))


def _add_cotangent(primitive, cotangents, v, cotangent) -> None:
    if not (cotangent is None or isinstance(v, Literal) or isinstance(cotangent, Zero)):
        cotangents[v] = cotangents[v] + cotangent if v in cotangents else cotangent


def _transpose_equation(eqn, cotangent, *values) -> tuple:
    """Return the cotangents of the unknown inputs, and None for the others."""
    if eqn is None:  # the identity
        return (cotangent,)
    unknown = [i for i, x in enumerate(values) if isinstance(x, UndefinedPrimal)]
    avals = [values[i].aval for i in unknown]
    if isinstance(cotangent, Zero):
        transposed = [Zero(aval) for aval in avals]
    else:
        shapes = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]

        def forward(*x):
            return _apply_equation(eqn, values, dict(zip(unknown, x, strict=True)))

        transposed = jax.linear_transpose(forward, *shapes)(cotangent)
    placed = dict(zip(unknown, transposed, strict=True))
    return tuple(placed.get(i) for i in range(len(values)))


def _pushed_forward(eqn, i, tangent, *values):
    """Return the tangent of the equation's result for a tangent of input ``i`` alone."""
    return tangent if eqn is None else _apply_equation(eqn, values, {i: tangent})


def _apply_equation(eqn, values, given: dict):
    """Evaluate the equation at the given inputs, the known values, and zeros for the others."""
    inputs = [given.get(i, x) for i, x in enumerate(values)]
    inputs = [x.aval if isinstance(x, UndefinedPrimal) else x for x in inputs]
    inputs = [jnp.zeros(x.shape, x.dtype) if isinstance(x, ShapedArray) else x for x in inputs]
    return bind(eqn, inputs)[0]


def _flops(f, optimize: bool, *args, **kwargs) -> float:
    lowered = jax.jit(f).lower(*args, **kwargs)
    cost = (lowered.compile() if optimize else lowered).cost_analysis() or {}
    return cost.get("flops", 0.0)  # without counts, neural-tangents takes the first implementation
