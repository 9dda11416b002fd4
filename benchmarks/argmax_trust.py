"""When `bilevel search` says "discretise", is the network with the argmax alone as good as any?

Four settings, twelve seeds each, and twelve others that the rule was chosen on (``tuning``). For
every seed: the search; the network of every activation alone, trained from the same weights on the
same rows; the rule's verdict by validation rows; and what the test rows say, by the search's outer
loss and by error. The argmax is *right* if it is within noise of the best: no more than one
standard error, of the paired difference on the test rows, above the activation that is best there.

    python benchmarks/argmax_trust.py            # goes on where it was
    python benchmarks/argmax_trust.py --quick    # one setting, three seeds; no results file
    python benchmarks/argmax_trust.py --table    # the results file as a table
"""

import argparse
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import bilevel
from bilevel.cli import argmax
from bilevel.cli import search as command
from bilevel.problem import side_by_side

RESULTS = Path(__file__).parent / "results" / "argmax_trust.jsonl"
SETTINGS = {
    "digits, hinge": {"data": "digits", "width": 128},
    "digits, 100 rows, logistic": {
        "data": "digits",
        "width": 64,
        "train": 100,
        "outer": "logistic",
    },
    "fashion-mnist, hinge": {"data": "fashion-mnist", "width": 64},
    "mnist, 200 rows, squared": {"data": "mnist", "width": 64, "train": 200, "outer": "squared"},
}
SEEDS, GROUPS = 12, {"tuning": 1, "measured": 0}


def measure(setting: str, group: str, seeds: int = SEEDS, **smaller) -> list[dict]:
    """One line a seed: what the rules look at, and what the test rows say."""
    began = time.perf_counter()
    config = command.Search(**SETTINGS[setting], seeds=seeds, seed=GROUPS[group], **smaller)
    config.check()
    task = command.setup(config)
    h = len(task.space.names)
    start = jnp.full((seeds, h), 1 / h)
    found = bilevel.search(
        side_by_side(task.space.problem),
        task.solver,
        command.geometry(config),
        start,
        task.w0,
        task.train,
        task.valid,
        steps=config.steps,
        progress=False,
    )
    alphas = [jnp.zeros_like(start).at[:, i].set(1) for i in range(h)]
    networks = [command.retrained(task, alpha) for alpha in (*alphas, found.alpha)]
    parts = {"validation": task.valid, "test": task.test}
    rows = {
        part: [argmax.losses_by_row(task.space, *network, batch) for network in networks]
        for part, batch in parts.items()
    }
    lines = []
    for seed in range(seeds):
        alpha = np.asarray(found.alpha[seed], float)
        line = {"setting": setting, "group": group, "seed": seed, "names": task.space.names}
        line |= {"alpha": alpha.round(4).tolist(), "outer": config.outer}
        for part, losses in rows.items():
            for by in ("loss", "error"):
                table = np.stack([np.asarray(a[by][seed], float) for a in losses], axis=1)
                line[f"{part} {by}"] = against(table, int(alpha.argmax()))
        lines.append(line)
    seconds = time.perf_counter() - began
    return [line | {"seconds": round(seconds / seeds, 1), "jax": jax.__version__} for line in lines]


def against(table: np.ndarray, choice: int) -> dict[str, list]:
    """Of losses [n, h + 1], the mixture's last: means, and differences from those of ``choice``."""
    gaps = table[:, [choice]] - table
    errors = gaps.std(axis=0, ddof=1) / len(table) ** 0.5
    columns = {"mean": table.mean(axis=0), "worse by": gaps.mean(axis=0), "error": errors}
    return {"rows": len(table)} | {k: v.round(6).tolist() for k, v in columns.items()}


# ----------------------------------------------------------------------------- what came of it


def within_noise(judged: dict[str, list], noise: float = 1.0) -> bool:
    """No activation is better by more than the noise; the mixture, which is last, is left out."""
    pairs = zip(judged["worse by"][:-1], judged["error"][:-1], strict=True)
    return all(gap <= noise * error + 1e-9 for gap, error in pairs)


def right(line: dict, by: str) -> bool:
    """Is the argmax within a standard error of the activation that is best on the test rows?"""
    judged = line[f"test {by}"]
    best = int(np.argmin(judged["mean"][:-1]))
    return judged["worse by"][best] <= judged["error"][best] + 1e-9


RULES = {
    "always": lambda line: True,
    "loss": lambda line: within_noise(line["validation loss"]),
    "error": lambda line: within_noise(line["validation error"]),
    "loss and error (the command's)": lambda line: (
        within_noise(line["validation loss"]) and within_noise(line["validation error"])
    ),
}


def table(lines: list[dict]) -> str:
    """How often each rule says "discretise", and how often that is right."""
    rows = [
        "| setting | rule | says so | right by loss | right by error |",
        "|---|---|---|---|---|",
    ]
    for group in GROUPS:
        own = [line for line in lines if line["group"] == group]
        for setting in (*SETTINGS, None):
            some = [line for line in own if setting in (line["setting"], None)]
            for rule, says in RULES.items() if some else ():
                yes = [line for line in some if says(line)]
                shares = [share([right(line, by) for line in yes]) for by in ("loss", "error")]
                cells = f"{group}: {setting or 'all'}", rule, f"{len(yes)} of {len(some)}", *shares
                rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def share(found: list[bool]) -> str:
    if not found:
        return "-"
    p = sum(found) / len(found)
    return f"{100 * p:.0f} ± {100 * (p * (1 - p) / len(found)) ** 0.5:.0f} %"


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true")
    options.add_argument("--table", action="store_true")
    flags = options.parse_args()
    if flags.quick:
        lines = measure("digits, hinge", "measured", 3, steps=5, inner_steps=20)
        print("\n".join(map(json.dumps, lines)))
        return
    done = (
        [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    )
    if not flags.table:
        for group in GROUPS:
            for setting in SETTINGS:
                if not any((d["setting"], d["group"]) == (setting, group) for d in done):
                    lines = measure(setting, group)
                    with RESULTS.open("a") as file:
                        file.writelines(json.dumps(line) + "\n" for line in lines)
                    done += lines
                    print(setting, group, flush=True)
    print(table(done))


if __name__ == "__main__":
    main()
