"""The gallery: every example of examples/ run in full, with its results and figures.

    python benchmarks/peers/gallery.py NAME ...    # inducing_points, ...; by default all, an hour

An example has ``FULL``, the flags of its full runs, ``main(**flags) -> rows, data to draw`` and
``picture([data to draw of each run], figure)``. Rows go to ``results/gallery.jsonl`` and replace
the example's earlier rows. Figures go to docs/images.
"""

import argparse
import importlib
import resource
import sys
import tempfile
from pathlib import Path

from benchmarks import harness
from benchmarks.harness import environment, read, where, write

MEASURES = ("examples",)

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs/images"
SIZES = {  # of the figures, inches
    "inducing_points": (8, 7),
    "meta_learning": (8, 3.2),
    "few_shot": (6, 3.5),
    "schedules": (8, 3.2),
    "denoising": (8, 5),
    "word_penalties": (6, 3.5),
    "label_cleaning": (8, 3.2),
    "text_transformer": (6, 3.5),
    "kernel_learning": (8, 6),
    "sparse_regression": (6, 3.5),
    "support_vectors": (6, 5),
    "mixtures": (6, 3.5),
    "sparse_words": (6, 3.5),
}


def example(name: str):
    sys.path.insert(0, str(ROOT / "examples"))
    return importlib.import_module(name)


def run(name: str, runs: list[dict] | None = None, images: Path = IMAGES) -> list[dict]:
    """Return the rows of all its full runs, or of ``runs``, with CPU times, and draw the figure."""
    import jax
    from matplotlib.figure import Figure
    from PIL import Image

    from bilevel import plots

    module, rows, drawn = example(name), [], []
    jax.config.update("jax_enable_x64", getattr(module, "X64", False))
    for flags in runs or module.FULL:
        before = resource.getrusage(resource.RUSAGE_SELF)
        example_rows, things = module.main(**flags)
        after = resource.getrusage(resource.RUSAGE_SELF)
        seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        drawn.append(things)
        row = {"part": name, "commit": harness.commit(), "rows": example_rows}
        rows.append(row | {"cpu_seconds": round(seconds, 1)})
    with plots.style():
        figure = Figure(SIZES[name], layout="constrained")
        module.picture(drawn, figure)
        path = images / f"gallery_{name}.png"
        figure.savefig(path, dpi=100, metadata={"Software": None})
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size
    return rows


def _table(name: str, published: dict | None = None):
    """Return a function of the rows that formats a part's table; ``published`` is a column."""

    def of_rows(rows: list[dict]) -> str:
        runs = where(rows, part=name)
        if not runs:
            return "No full run yet."
        example_rows = [row for run in runs for row in run["rows"]]
        if published:
            keys = [tuple(row.values())[:2] for row in example_rows]
            columns = [{"learned, published": published[key]} for key in keys]
            example_rows = [r | more for r, more in zip(example_rows, columns, strict=True)]
        total = sum(run["cpu_seconds"] for run in runs)
        command = f"python benchmarks/peers/gallery.py {name}"
        return f"{harness.table_of(example_rows)}\n\n`{command}`: {total:,.0f} s of CPU time."

    return of_rows


# Errors of "KIP FC" in Table 1 of Nguyen, Novak, Xiao & Lee (2021), by data and images a class.
KIP = {("mnist", 1): 0.145, ("mnist", 10): 0.028, ("cifar10", 1): 0.595, ("cifar10", 10): 0.469}
inducing_points = _table("inducing_points", KIP)
meta_learning = _table("meta_learning")
few_shot = _table("few_shot")
schedules = _table("schedules")
denoising = _table("denoising")
word_penalties = _table("word_penalties")
label_cleaning = _table("label_cleaning")
text_transformer = _table("text_transformer")
kernel_learning = _table("kernel_learning")
mixtures = _table("mixtures")


def smoke() -> list[dict]:
    """Return the rows of one tiny run. tests/repository/test_gallery.py runs every example."""
    harness.compile_quickly()
    tiny = {"steps": 2, "names": ["MAML"]}
    with tempfile.TemporaryDirectory() as folder:
        return run("meta_learning", [tiny], Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SIZES, []], default=[])
    parser.add_argument("--smoke", action="store_true", help="only shows that the script runs")
    flags = parser.parse_args()
    if flags.smoke and flags.names:
        parser.error(f"--smoke: expected no names, got {', '.join(flags.names)}")
    if flags.smoke:
        harness.finish(smoke(), None, meta_learning)
        return
    path = harness.RESULTS / "gallery.jsonl"
    for name in flags.names or SIZES:
        fresh = run(name)
        others = [row for row in read(path) if row["part"] not in (name, "environment")]
        write(path, [environment("flax", "optax"), *others, *fresh])


if __name__ == "__main__":
    main()
