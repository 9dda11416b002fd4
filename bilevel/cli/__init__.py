"""Command line: ``bilevel search``, ``certify``, ``baseline``; also as ``python -m bilevel``."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from bilevel.cli import interrupts
from bilevel.cli.baseline import Baseline, run_baseline
from bilevel.cli.certify import Certify, run_certify
from bilevel.cli.darts import QUICK as QUICK_DARTS
from bilevel.cli.darts import DartsSearch, run_darts_search
from bilevel.cli.flags import Flags
from bilevel.cli.nasbench201 import QUICK as QUICK_NASBENCH201
from bilevel.cli.nasbench201 import NasBench201Search, run_nasbench201_search
from bilevel.cli.rank import Rank, run_rank
from bilevel.cli.runs import Stopped
from bilevel.cli.search import Search, run_search
from bilevel.cli.skips import QUICK as QUICK_SKIPS
from bilevel.cli.skips import SkipSearch, run_skip_search

_RUNS: dict[type, Callable[[Any], Any]] = {
    Search: run_search,
    SkipSearch: run_skip_search,
    DartsSearch: run_darts_search,
    NasBench201Search: run_nasbench201_search,
    Certify: run_certify,
    Baseline: run_baseline,
    Rank: run_rank,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (the command line's by default), run the job; the exit status.

    Mistakes of the user's (a bad flag, a missing file) print one sentence and exit with 2; Ctrl-C
    prints one too, with what is left of the run, and exits with 130.
    """
    try:
        with interrupts.heard():
            config = parse(sys.argv[1:] if arguments is None else arguments)
            if config is None:
                _print_version()
            else:
                _RUNS[type(config)](config)
    except (KeyboardInterrupt, Stopped) as stop:
        return _said(str(stop) or "interrupted", 130)
    except OSError as error:
        file = f"{error.filename}: " if error.filename else ""
        return _said(f"{file}{error.strerror}." if error.strerror else str(error), 2)
    except MemoryError as error:
        return _said(f"memory: expected enough for these sizes, got too little: {error}", 2)
    except (ValueError, FloatingPointError) as error:
        return _said(str(error), 2)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _said(f"memory: expected enough for these sizes, got too little: {error}", 2)
    return 0


def _said(sentence: str, status: int) -> int:
    print(f"bilevel: {' '.join(sentence.split())}", file=sys.stderr)
    return status


def parse(arguments: Sequence[str]) -> Flags | None:
    """The flags of the command in ``arguments``, not checked yet; None for ``bilevel version``.

    Raises
    ------
    ValueError
        For a command or a flag that there is not, and a value that is no value of its kind.
    """
    import tyro

    arguments, space, quick = _routed(arguments)
    app = tyro.extras.SubcommandApp()

    def search(config: tyro.conf.OmitArgPrefixes[Search]) -> Flags:
        """Search the activation of a one-hidden-layer network, and compare with every baseline.

        With --space skips, search activations and skip connections of a deep network instead; with
        --space darts, the cells of a convolutional one; with --space nasbench201, those whose
        accuracies are known. These have --quick: smaller sizes to start from.
        """
        return config

    skip_start = QUICK_SKIPS if quick else SkipSearch()
    darts_start = QUICK_DARTS if quick else DartsSearch()
    nasbench201_start = QUICK_NASBENCH201 if quick else NasBench201Search()

    def search_skips(config: tyro.conf.OmitArgPrefixes[SkipSearch] = skip_start) -> Flags:
        """Search activations and skip connections of a deep network, layer by layer."""
        return config

    def search_darts(config: tyro.conf.OmitArgPrefixes[DartsSearch] = darts_start) -> Flags:
        """Search the cells of a convolutional network."""
        return config

    def search_nasbench201(
        config: tyro.conf.OmitArgPrefixes[NasBench201Search] = nasbench201_start,
    ) -> Flags:
        """Search the cell of NAS-Bench-201, and look up what its network reaches."""
        return config

    searches: dict[str, Callable[..., Flags]] = {
        "activations": search,
        "skips": search_skips,
        "darts": search_darts,
        "nasbench201": search_nasbench201,
    }
    if space not in searches:
        raise ValueError(f"space: expected one of {', '.join(searches)}, got {space!r}.")
    app.command(name="search")(searches[space])

    @app.command(name="certify")
    def certify(config: tyro.conf.OmitArgPrefixes[Certify]) -> Flags:
        """Certify the smallest eigenvalue of the kernel over all mixtures of activations."""
        return config

    @app.command(name="baseline")
    def baseline(config: tyro.conf.OmitArgPrefixes[Baseline]) -> Flags:
        """Choose a feature map by weight sharing, Hyperband, random search and the like."""
        return config

    @app.command(name="rank")
    def rank(config: tyro.conf.OmitArgPrefixes[Rank]) -> Flags:
        """Rank the networks of NAS-Bench-201 by train-free scores, and judge the scores."""
        return config

    @app.command(name="version")
    def version() -> None:
        """Print the version and those of JAX and its devices."""

    with contextlib.redirect_stderr(io.StringIO()) as box:
        try:
            return app.cli(args=arguments, prog="bilevel", description=__doc__)
        except SystemExit as end:
            if end.code:
                raise ValueError(_sentence(box.getvalue())) from None
            raise


def _sentence(box: str) -> str:
    """What tyro draws in a box, below a title and above help that a rule sets off.

    A terminal that has no lines gets hyphens, and a rule below the title too.
    """
    _, *lines = [line.strip("│ \n") for line in box.splitlines()]
    rules = [set(line) <= set("╭╮╰╯─- ") for line in lines]
    start = rules.index(False)
    end = next((i for i, rule in enumerate(rules) if rule and i > start), len(lines))
    found = " ".join(lines[start:end]).rstrip(".")
    rest = [line for line, rule in zip(lines[end:], rules[end:], strict=True) if not rule]
    meant = re.findall(r"^(--[\w-]+)", "\n".join(rest), re.MULTILINE)
    perhaps = f" (perhaps {', '.join(dict.fromkeys(meant))})" if "Perhaps" in box else ""
    return f"{found}{perhaps}; see --help."


def _print_version() -> None:
    from importlib.metadata import version

    devices = ", ".join(str(d) for d in jax.devices())
    print(f"bilevel {version('bilevel')}, jax {jax.__version__} on {devices}")


def _routed(arguments: Sequence[str]) -> tuple[list[str], str, bool]:
    """The flags of ``search`` that decide which others there are, taken off before parsing.

    ``--space NAME``, and for the deep spaces ``--quick``.
    """
    rest, space, quick = list(arguments), "activations", False
    if rest[:1] == ["search"]:
        for i, flag in enumerate(rest):
            name, equals, value = flag.partition("=")
            if name == "--space":
                space = value if equals else "".join(rest[i + 1 : i + 2])
                del rest[i : i + (1 if equals else 2)]
                break
        if space != "activations" and "--quick" in rest:
            rest.remove("--quick")
            quick = True
    return rest, space, quick
