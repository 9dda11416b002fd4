"""Generated command lines: a result, or one sentence and status 2; no traceback, no left-overs.

Each runs in a process of its own, whose memory is limited: a size that cannot fit has to be refused
and not tried.
"""

import contextlib
import io
import json
import multiprocessing
import re
import resource
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reliability.case import Outcome

_PATIENCE = 300
_MEMORY = 24 * 2**30  # of addresses, most of which a process never touches
_SMALL = {
    "search": {
        "activations": ["relu", "tanh"],
        "steps": 2,
        "inner-steps": 3,
        "width": 16,
        "train": 20,
        "valid": 20,
        "test": 40,
    },
    "certify": {"rows": 12, "activations": ["relu", "tanh"]},
    "baseline": {
        "method": "random-search",
        "configs": 3,
        "dimension": 32,
        "train": 60,
        "valid": 40,
    },
    "rank": {
        "data": "digits",
        "networks": 4,
        "scores": ["l2_norm"],
        "k": 2,
        "pool": 4,
        "batch-size": 4,
        "cells": 1,
        "channels": 2,
        "train": 16,
        "test": 20,
        "judged": None,
    },
    "search-skips": {"activations": ["relu", "tanh"], "steps": 2, "depth": 3, "width": 4},
    "search-darts": {"steps": 2, "cells": 1, "channels": 2},
    "search-nasbench201": {"steps": 2, "cells": 1, "channels": 2},
}
# Of a deep space only what is refused at once is tried: the rest compiles for minutes.
_OFTEN = (0.3, 0.25, 0.2, 0.13, 0.04, 0.04, 0.04)

_WHOLE = ["0", "-1", "2.5", "nan", "x", "", "1" + "0" * 12, "1" + "0" * 30]
_NAME = ["nonsense", "", "3"]
_REAL = ["-1", "nan", "inf", "-inf", "1e308", "x", "", "0"]
_WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(
        (
            "steps",
            "inner-steps",
            "width",
            "train",
            "valid",
            "test",
            "seeds",
            "rows",
            "configs",
            "dimension",
            "networks",
            "k",
            "pool",
            "batch-size",
            "cells",
            "channels",
            "depth",
        ),
        _WHOLE,
    ),
    "seed": ["-1", "2.5", "x", "1" + "0" * 30],
    **dict.fromkeys(("alpha-rate", "penalty", "rtol"), _REAL),
    "activations": [["relo"], [], ["relu", "relu"], ["relu", ""], ["RELU"]],
    "scores": [["nas"], [], ["l2_norm", "l2_norm"]],
    **{name: _NAME for name in ("data", "geometry", "solver", "outer", "method")},
    "out": ["", "{file}/x", "{place}/" + "x" * 300, "{file}", "/proc/nowhere/run"],
    "resume": [None],
}
_FLAGS = {
    "search": (
        "steps",
        "inner-steps",
        "width",
        "train",
        "valid",
        "test",
        "seeds",
        "seed",
        "alpha-rate",
        "activations",
        "data",
        "geometry",
        "solver",
        "outer",
        "out",
        "resume",
    ),
    "certify": ("rows", "rtol", "activations", "data", "seed", "out"),
    "baseline": (
        "configs",
        "dimension",
        "train",
        "valid",
        "test",
        "penalty",
        "method",
        "data",
        "seed",
        "out",
        "resume",
    ),
    "rank": (
        "networks",
        "k",
        "pool",
        "batch-size",
        "cells",
        "channels",
        "train",
        "test",
        "scores",
        "data",
        "seed",
        "out",
        "resume",
    ),
    "search-skips": ("steps", "width", "depth", "activations", "seed", "out", "resume"),
    "search-darts": ("steps", "cells", "channels", "seed", "out", "resume"),
    "search-nasbench201": ("steps", "cells", "channels", "seed", "out", "resume"),
}
_EITHER = ("--seed -1",)  # a seed, as good as any, if it is taken for one
# Flags that other values make meaningless, or that are right as they are.
_FINE = {
    ("search", "test", "1" + "0" * 12),
    ("search", "test", "1" + "0" * 30),
    ("baseline", "test", "1" + "0" * 12),
    ("baseline", "test", "1" + "0" * 30),
    ("rank", "test", "1" + "0" * 12),
    ("rank", "test", "1" + "0" * 30),
}


def _line(rng) -> tuple[str, dict[str, Any], str]:
    """A command with its flags, and what is wrong with them."""
    command = str(rng.choice(list(_SMALL), p=_OFTEN))
    flags = {"out": "{place}/run", "progress": "False"} | _SMALL[command]
    if command == "certify":
        del flags["progress"]
    if "-" not in command and rng.random() < 0.12:
        return command, flags, ""
    if rng.random() < 0.06:
        return command, flags | {"nonsense": "3"}, "an unknown flag"
    name = str(rng.choice(_FLAGS[command]))
    choices = [v for v in _WRONG[name] if (command, name, str(v)) not in _FINE]
    value = choices[rng.integers(len(choices))]
    return command, flags | {name: value}, f"--{name} {value}"


def _words(command: str, flags: dict[str, Any], place: Path) -> list[str]:
    words = command.split()
    for name, value in flags.items():
        if name == "judged":
            words.append("--no-judged")
        elif value is None:
            words.append(f"--{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *value]
        elif value.startswith("-") if isinstance(value, str) else False:
            words.append(f"--{name}={value}")
        else:
            words += [f"--{name}", str(value)]
    return [w.replace("{place}", str(place)).replace("{file}", str(place / "file")) for w in words]


def _run(words: list[str], output: Path) -> None:
    """In a process of its own: status and what was printed."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    warnings.simplefilter("ignore")
    from bilevel.cli import main

    printed, errors, status, raised, parsed = io.StringIO(), io.StringIO(), None, "", False
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            status = main(words)
        except SystemExit as end:  # how a parser of flags refuses
            status, parsed = end.code, True
        except BaseException as error:
            raised = f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"
    report = {
        "status": status,
        "parsed": parsed,
        "raised": raised,
        "errors": errors.getvalue(),
        "printed": printed.getvalue(),
    }
    output.write_text(json.dumps(report))


def commands(seed: int, number: int) -> Outcome:
    """One command line."""
    rng = np.random.default_rng([seed, 8, number])
    command, flags, mistake = _line(rng)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        place, output = Path(folder) / "place", Path(folder) / "report.json"
        place.mkdir()
        (place / "file").write_text("not a folder")
        words = _words(command, flags, place)
        process = context.Process(target=_run, args=(words, output), daemon=True)
        process.start()
        process.join(_PATIENCE)
        if process.exitcode is None:
            process.kill()
            process.join()
            return Outcome(
                "raw", mistake or "good", f"bilevel {command}: not done in {_PATIENCE} s"
            )
        if not output.exists():
            return Outcome(
                "raw", mistake or "good", f"bilevel {command}: died ({process.exitcode})"
            )
        output_record = json.loads(output.read_text())
        left = [p.name for p in place.iterdir() if p.name != "file"]
        result = place / "run" / "result.json"
        numbers = json.loads(result.read_text()) if result.exists() else None
    return _verdict(command, mistake, output_record, left, numbers)


def _verdict(command, mistake, record, left, numbers) -> Outcome:
    attack = f"bilevel {command}: {mistake or 'good'}"
    if record["raised"]:
        return Outcome("raw", attack, record["raised"])
    if not mistake:
        good = record["status"] in (0, None) and numbers is not None
        return Outcome("right" if good else "wrong", attack, record["errors"].strip()[-200:])
    if record["status"] in (0, None):
        return Outcome("right" if mistake in _EITHER else "wrong", attack, "accepted")
    message = record["errors"].strip()
    parsed = record["parsed"]  # the parser of flags has a form of its own
    if not parsed and (message.count("\n") or len(message) > 400 or not message):
        return Outcome("raw", attack, f"not one sentence: {message[:150]}")
    if left:
        return Outcome("wrong", attack, f"refused, but left {', '.join(left)[:80]} behind")
    flag = mistake.split()[0].strip("-").replace("-", "[-_ ]")
    flag = {"resume": "resume|out"}.get(flag, flag)  # there is nothing in the directory
    if not parsed and "an unknown flag" not in mistake and not _named(flag, message):
        return Outcome("raw", attack, f"names no flag: {message[:150]}")
    return Outcome("refused", attack)


def _named(flag: str, message: str) -> bool:
    return bool(re.search(flag, message))
