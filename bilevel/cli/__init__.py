"""Command line: ``bilevel search``, ``certify``, ``baseline``; also as ``python -m bilevel``."""

import sys
from collections.abc import Callable, Sequence

from bilevel.cli.baseline import Baseline, run_baseline
from bilevel.cli.certify import Certify, run_certify
from bilevel.cli.darts import QUICK as QUICK_DARTS
from bilevel.cli.darts import DartsSearch, run_darts_search
from bilevel.cli.nasbench201 import QUICK as QUICK_NASBENCH201
from bilevel.cli.nasbench201 import NasBench201Search, run_nasbench201_search
from bilevel.cli.rank import Rank, run_rank
from bilevel.cli.search import Search, run_search
from bilevel.cli.skips import QUICK as QUICK_SKIPS
from bilevel.cli.skips import SkipSearch, run_skip_search


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (the command line's by default), run the job; the exit status.

    Mistakes of the user's (a bad flag, a missing file) print one sentence and exit with 2.
    """
    import tyro

    arguments, space, quick = _routed(sys.argv[1:] if arguments is None else arguments)
    app = tyro.extras.SubcommandApp()

    def search(config: tyro.conf.OmitArgPrefixes[Search]) -> None:
        """Search the activation of a one-hidden-layer network, and compare with every baseline.

        With --space skips, search activations and skip connections of a deep network instead; with
        --space darts, the cells of a convolutional one; with --space nasbench201, those whose
        accuracies are known. These have --quick: smaller sizes to start from.
        """
        run_search(config)

    skip_start = QUICK_SKIPS if quick else SkipSearch()
    darts_start = QUICK_DARTS if quick else DartsSearch()
    nasbench201_start = QUICK_NASBENCH201 if quick else NasBench201Search()

    def search_skips(config: tyro.conf.OmitArgPrefixes[SkipSearch] = skip_start) -> None:
        """Search activations and skip connections of a deep network, layer by layer."""
        run_skip_search(config)

    def search_darts(config: tyro.conf.OmitArgPrefixes[DartsSearch] = darts_start) -> None:
        """Search the cells of a convolutional network."""
        run_darts_search(config)

    def search_nasbench201(
        config: tyro.conf.OmitArgPrefixes[NasBench201Search] = nasbench201_start,
    ) -> None:
        """Search the cell of NAS-Bench-201, and look up what its network reaches."""
        run_nasbench201_search(config)

    searches: dict[str, Callable[..., None]] = {
        "activations": search,
        "skips": search_skips,
        "darts": search_darts,
        "nasbench201": search_nasbench201,
    }
    if space not in searches:
        expected = ", ".join(searches)
        print(f"bilevel: space: expected one of {expected}, got {space!r}.", file=sys.stderr)
        return 2
    app.command(name="search")(searches[space])

    @app.command(name="certify")
    def certify(config: tyro.conf.OmitArgPrefixes[Certify]) -> None:
        """Certify the smallest eigenvalue of the kernel over all mixtures of activations."""
        run_certify(config)

    @app.command(name="baseline")
    def baseline(config: tyro.conf.OmitArgPrefixes[Baseline]) -> None:
        """Choose a feature map by weight sharing, Hyperband, random search and the like."""
        run_baseline(config)

    @app.command(name="rank")
    def rank(config: tyro.conf.OmitArgPrefixes[Rank]) -> None:
        """Rank the networks of NAS-Bench-201 by train-free scores, and judge the scores."""
        run_rank(config)

    @app.command(name="version")
    def version() -> None:
        """Print the version and those of JAX and its devices."""
        from importlib.metadata import version

        import jax

        devices = ", ".join(str(d) for d in jax.devices())
        print(f"bilevel {version('bilevel')}, jax {jax.__version__} on {devices}")

    try:
        app.cli(args=arguments, prog="bilevel", description=__doc__)
    except (ValueError, FileNotFoundError, FloatingPointError) as error:
        print(f"bilevel: {error}", file=sys.stderr)
        return 2
    return 0


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
