"""Command line: ``bilevel search``, ``certify``, ``baseline``; also as ``python -m bilevel``."""

import sys
from collections.abc import Sequence

from bilevel.cli.baseline import Baseline, run_baseline
from bilevel.cli.certify import Certify, run_certify
from bilevel.cli.search import Search, run_search


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` (the command line's by default), run the job; the exit status.

    Mistakes of the user's (a bad flag, a missing file) print one sentence and exit with 2.
    """
    import tyro

    app = tyro.extras.SubcommandApp()

    @app.command(name="search")
    def search(config: tyro.conf.OmitArgPrefixes[Search]) -> None:
        """Search the activation of a one-hidden-layer network, and compare with every baseline."""
        run_search(config)

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
