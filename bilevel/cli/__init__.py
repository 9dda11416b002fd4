"""Command line: ``bilevel search``, ``certify``, ``baseline``; also as ``python -m bilevel``."""

import sys
from collections.abc import Callable, Sequence

from bilevel.cli.baseline import Baseline, run_baseline
from bilevel.cli.certify import Certify, run_certify
from bilevel.cli.search import Search, run_search
from bilevel.cli.skips import SkipSearch, run_skip_search


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (the command line's by default), run the job; the exit status.

    Mistakes of the user's (a bad flag, a missing file) print one sentence and exit with 2.
    """
    import tyro

    arguments, space = _without_space(sys.argv[1:] if arguments is None else arguments)
    app = tyro.extras.SubcommandApp()

    def search(config: tyro.conf.OmitArgPrefixes[Search]) -> None:
        """Search the activation of a one-hidden-layer network, and compare with every baseline.

        With --space skips, search activations and skip connections of a deep network instead.
        """
        run_search(config)

    def search_skips(config: tyro.conf.OmitArgPrefixes[SkipSearch]) -> None:
        """Search activations and skip connections of a deep network, layer by layer."""
        run_skip_search(config)

    searches: dict[str, Callable[..., None]] = {"activations": search, "skips": search_skips}
    if space not in searches:
        print(f"bilevel: space: expected {' or '.join(searches)}, got {space!r}.", file=sys.stderr)
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


def _without_space(arguments: Sequence[str]) -> tuple[list[str], str]:
    """``search --space NAME`` decides which flags there are: taken off before they are parsed."""
    rest, space = list(arguments), "activations"
    if rest[:1] == ["search"]:
        for i, flag in enumerate(rest):
            name, equals, value = flag.partition("=")
            if name == "--space":
                space = value if equals else "".join(rest[i + 1 : i + 2])
                del rest[i : i + (1 if equals else 2)]
                break
    return rest, space
