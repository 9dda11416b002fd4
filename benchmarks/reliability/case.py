"""One generated input of a public function: the call, its oracle, its attacks, the verdict.

A :class:`Case` is a call with good arguments and a check of its result against a source of truth
that is not the function itself. It is attacked in one of these ways:

==========  =====================================================================================
``good``    as it is: the check decides
``jit``     the same, compiled with the arrays traced: the same check decides
``vmap``    over three copies of the arrays: the check decides on every row
``bad``     one argument made wrong (:mod:`reliability.bad`): a sentence that names an argument,
            or a result that is visibly not finite
``traced``  NaN in one array that is traced, where nothing can be raised: a result not finite
==========  =====================================================================================

==============  =================================================================================
verdict         meaning
==============  =================================================================================
``right``       the check holds
``refused``     a sentence that names an argument
``flagged``     NaN or infinity in the result of a bad input
``no answer``   a good but extreme input was refused, or its result is not finite
``wrong``       the check fails; an ordinary good input refused; a bad one answered as if good
``swallowed``   NaN went in, finite numbers came out
``raw``         an exception of a foreign kind: not the library's, no sentence, no name in it
``misfit``      the same, where the argument was of a kind it could never be: a text for a number
==============  =================================================================================

``wrong`` and ``swallowed`` are *silent*: nothing tells the user. (Two kinds of ``wrong`` are loud,
and are counted there all the same: a good input refused, and left-overs of a refusal.) ``raw`` and
``misfit`` are loud, but explain nothing. The goal is no ``wrong``, no ``swallowed`` and no ``raw``;
misfits are counted. All four are listed with the line that makes them again.
"""

import operator
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
import ntk

VERDICTS = ("right", "refused", "flagged", "no answer", "wrong", "swallowed", "raw", "misfit")
SILENT, RAW = ("wrong", "swallowed"), ("raw", "misfit")
LISTED, FAILURES = (*SILENT, *RAW), (*SILENT, "raw")
MISFITS = ("a text", "a function", "a number", "none", "an array")

_OURS = tuple(str(Path(package.__file__).parent) for package in (bilevel, ntk))
_CAMPAIGN = str(Path(__file__).parent)
_SENTENCE = 400  # characters
_SECONDS = 120  # that one call may take
_KINDS = (ValueError, TypeError, FloatingPointError, FileNotFoundError, NotImplementedError)


class Case(NamedTuple):
    """A call with good arguments; see the module."""

    call: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any], str]  # "" where the result is right, else what is wrong with it
    kinds: dict[str, str]  # of the arguments that can be made wrong: see reliability.bad
    traced: tuple[str, ...] = ()  # arguments that may be traced, and all have to matter
    extreme: bool = False  # sizes at which no answer is an answer
    fine: tuple[str, ...] = ()  # mistakes "argument: what" that are none here
    vmapped: bool = True  # whether vmap over the traced arguments is promised
    mistake: str = ""  # what is wrong with the call as it is, which has to be refused
    answer: Callable[[Any], Any] = lambda result: result  # the part that may not be finite


class Outcome(NamedTuple):
    """What came of a call."""

    verdict: str
    attack: str
    detail: str = ""


class SlowError(Exception):
    """A call took longer than any of these may."""


def run_good(case: Case, attack: str = "good") -> Outcome:
    """Verdict on a good call, ``attack`` one of good, jit, vmap."""
    call = {"good": _eager, "jit": _compiled, "vmap": _batched}[attack]
    try:
        with limited():
            results = call(case)
            reasons = [case.check(result) for result in results]
    except Exception as error:
        reason = not_a_sentence(error, case.arguments)
        if reason and not _in_the_check(error):
            return Outcome("raw", attack, reason)
        if case.extreme and not reason:
            return Outcome("no answer", attack, str(error))
        return Outcome("wrong", attack, f"an ordinary input raised: {said(error)}")
    reason = next(filter(None, reasons), "")
    if not reason:
        return Outcome("right", attack)
    if case.extreme and not all(is_finite(result) for result in results):
        return Outcome("no answer", attack, reason)
    return Outcome("wrong", attack, reason)


def run_bad(case: Case, what: str, changed: dict[str, Any]) -> Outcome:
    """Verdict on a call with ``changed`` arguments, ``what`` is wrong with which."""
    attack = ": ".join([*changed, what])
    try:
        with limited():
            result = jax.block_until_ready(case.call(**case.arguments | changed))
            finite = is_finite(case.answer(result))
    except Exception as error:
        reason = not_a_sentence(error, case.arguments)
        kind = "misfit" if what in MISFITS else "raw"
        return Outcome(kind, attack, reason) if reason else Outcome("refused", attack)
    if not finite:
        return Outcome("flagged", attack)
    swallowed = what.startswith(("nan", "inf"))
    return Outcome("swallowed" if swallowed else "wrong", attack, f"answered: {short(result)}")


def run_traced(case: Case, name: str, value: Any) -> Outcome:
    """Verdict on NaN planted in a traced argument."""
    attack = f"{name}: nan, traced"
    try:
        with limited():
            (result,) = _compiled(case._replace(arguments=case.arguments | {name: value}))
            finite = is_finite(case.answer(result))
    except Exception as error:
        reason = not_a_sentence(error, case.arguments)
        return Outcome("raw", attack, reason) if reason else Outcome("refused", attack)
    if finite:
        return Outcome("swallowed", attack, f"answered: {short(result)}")
    return Outcome("flagged", attack)


# ----------------------------------------------------------------------------- the ways to call


def _eager(case: Case) -> list[Any]:
    return [jax.block_until_ready(case.call(**case.arguments))]


def _split(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    arrays = {k: case.arguments[k] for k in case.traced}
    return arrays, {k: v for k, v in case.arguments.items() if k not in arrays}


def _compiled(case: Case) -> list[Any]:
    arrays, rest = _split(case)
    return [jax.block_until_ready(jax.jit(lambda a: case.call(**a, **rest))(arrays))]


def _batched(case: Case) -> list[Any]:
    arrays, rest = _split(case)
    copies = jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * 3), arrays)
    results = jax.block_until_ready(jax.jit(jax.vmap(lambda a: case.call(**a, **rest)))(copies))
    return [jax.tree.map(operator.itemgetter(i), results) for i in range(3)]


@contextmanager
def limited() -> Iterator[None]:
    """A hang is an outcome too; errors keep their innermost frame."""
    filtering = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    usual = signal.signal(signal.SIGALRM, _give_up)
    signal.alarm(_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of numbers that are meant to be bad
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, usual)
        jax.config.update("jax_traceback_filtering", filtering)


def _give_up(number, frame):
    raise SlowError(f"not done after {_SECONDS} s")


# ----------------------------------------------------------------------------- what came of it


def not_a_sentence(error: BaseException, arguments: dict[str, Any]) -> str:
    """Why an exception is not a refusal in one sentence; "" where it is one.

    A refusal is raised by the library itself, says one sentence and names an argument in it. What
    a user's own function raises, called with what the user gave, is the user's.
    """
    if _from_the_users_function(error):
        return ""
    message = str(error)
    if not isinstance(error, _KINDS):
        return f"not a kind that refuses: {said(error)}"
    if not _frames(error)[-1].startswith(_OURS):
        return f"raised inside another library: {said(error)}"
    if len(message) > _SENTENCE or "\n" in message.strip():
        return f"not one sentence: {said(error)}"
    named = re.match(r"[\w\[\]\"., ]{1,40}: expected", message)  # the house's form
    if not named and not any(re.search(rf"\b{re.escape(name)}\b", message) for name in arguments):
        return f"names no argument: {said(error)}"
    return ""


def _frames(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def _from_the_users_function(error: BaseException) -> bool:
    """Whether the campaign's own function, called by the library, is where it happened."""
    frames = _frames(error)
    ours = [i for i, name in enumerate(frames) if name.startswith(_OURS)]
    return bool(ours) and any(name.startswith(_CAMPAIGN) for name in frames[ours[0] :])


def _in_the_check(error: BaseException) -> bool:
    return not any(name.startswith(_OURS) for name in _frames(error))


def said(error: BaseException) -> str:
    """An exception in one short line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def short(result: Any) -> str:
    """A result in one short line."""
    leaves = [np.asarray(x).ravel()[:3].tolist() for x in numbers(result)[:3]]
    return " ".join(str(leaves).split())[:120]


def numbers(tree: Any) -> list[np.ndarray]:
    """The numeric leaves."""
    arrays = []
    for x in jax.tree.leaves(tree):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            continue
        array = np.asarray(x)
        if array.dtype.kind in "biufc" or array.dtype == jnp.bfloat16:
            arrays.append(array)
    return arrays


def _real(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag]) if x.dtype.kind == "c" else x.astype(np.float64)


def is_finite(tree: Any) -> bool:
    """Whether every number in a result is; of functions and texts there is nothing to say."""
    return all(np.isfinite(_real(x)).all() for x in numbers(tree) if x.size)


# ----------------------------------------------------------------------------- what checks say


def near(what: str, actual: Any, expected: Any, tolerance: float) -> str:
    """ "" where all entries agree, relative to the largest one expected."""
    a, e = (
        np.concatenate([np.ravel(x).astype(np.float64) for x in numbers(t)] or [np.zeros(0)])
        for t in (actual, expected)
    )
    if a.shape != e.shape:
        return f"{what}: expected {e.size} numbers, got {a.size}"
    if not a.size:
        return ""
    same = (a == e) | (np.isnan(a) & np.isnan(e))
    finite = np.isfinite(e)
    scale = np.max(np.abs(e[finite]), initial=0.0) or 1.0
    with np.errstate(all="ignore"):
        off = np.where(same, 0.0, np.abs(a - e) / scale)
    off = np.where(np.isnan(off), np.inf, off)
    worst = int(off.argmax())
    if off[worst] <= tolerance:
        return ""
    return f"{what}: expected {e[worst]:.6g}, got {a[worst]:.6g}, off by {off[worst]:.1e} relative"


def at_most(what: str, small: Any, large: Any, slack: float = 0.0) -> str:
    """ "" where ``small <= large + slack`` everywhere."""
    small, large = np.asarray(small, np.float64), np.asarray(large, np.float64)
    if np.all(small <= large + slack):
        return ""
    return f"{what}: expected {np.max(small):.6g} <= {np.min(large):.6g}"


def that(holds: Any, what: str) -> str:
    """ "" where it holds."""
    return "" if bool(holds) else what


def first(*reasons: str) -> str:
    """The first thing that is wrong."""
    return next(filter(None, reasons), "")


def eps(dtype: Any) -> float:
    """One rounding of a dtype."""
    return float(jnp.finfo(dtype).eps)
