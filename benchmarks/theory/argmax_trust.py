"""When `bilevel search` says "discretise", is the network with the argmax alone as good as any?

There are four settings. Their seeds come in blocks of twelve. The rule was chosen on the block
``tuning`` of each setting. The setting in which the command says "yes" most often has the most
other blocks.

Every seed has the search; a network of every activation alone, trained from the same weights on the
same rows; the rule's verdict by validation rows; and the result on the test rows, by the search's
outer loss and by error. The argmax is *right* if it is within noise of the best. This means: at
most one standard error (of the paired difference on the test rows) above the activation that is
best there.

    python benchmarks/theory/argmax_trust.py            # resumable
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import activation_searches, harness
from bilevel.spaces.activations import losses_by_row
from bilevel.strategies.activation_search import solver, train_weights

MEASURES = (
    "bilevel/strategies/activation_search.py",
    "bilevel/spaces/activations.py",
    "bilevel/discretize/judgement.py",
    "bilevel/solvers/_unrolled.py",
)

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
SEEDS, TUNING = 12, 1  # of a block, and the PRNG key of the blocks on which the rule was chosen
GROUPS = "tuning", "measured"
HINGE, FEW, FASHION, MNIST = SETTINGS
KEYS = {HINGE: (0, *range(2, 10)), FEW: (0, 2, 3), MNIST: (0, 2, 3), FASHION: (0, 2)}
BLOCKS = [(setting, key) for setting, keys in KEYS.items() for key in (*keys, TUNING)]


def measure(
    setting: str,
    block: int,
    seeds: int = SEEDS,
    *,
    steps: int = activation_searches.STEPS,
    inner_steps: int = activation_searches.INNER_STEPS,
    **smaller,
) -> list[dict]:
    """Return a line for each seed (``block`` is their key): inputs of the rules, test results."""
    began = time.perf_counter()
    options = {"seeds": seeds, "seed": block} | SETTINGS[setting] | smaller
    task = activation_searches.task_of(**options)
    way = solver(task, inner_steps)
    searched, h = activation_searches.search(task, way, steps), len(task.space.names)
    alphas = [*(jnp.zeros((seeds, h)).at[:, i].set(1) for i in range(h)), searched]
    networks = [(train_weights(task, way, alpha), alpha) for alpha in alphas]
    rows = {
        part: [losses_by_row(task.space, *network, batch) for network in networks]
        for part, batch in (("validation", task.valid), ("test", task.test))
    }
    lines = []
    for seed in range(seeds):
        alpha = np.asarray(searched[seed], float)
        line = {"setting": setting, "group": GROUPS[block != TUNING], "block": block}
        line |= {"seed": seed, "names": task.space.names}
        line |= {"alpha": alpha.round(4).tolist(), "outer": options.get("outer", "hinge")}
        for part, losses in rows.items():
            for by in ("loss", "error"):
                table = np.stack([np.asarray(a[by][seed], float) for a in losses], axis=1)
                line[f"{part} {by}"] = against(table, int(alpha.argmax()))
        lines.append(line)
    seconds = time.perf_counter() - began
    return [line | {"seconds": round(seconds / seeds, 1), "jax": jax.__version__} for line in lines]


def against(table: np.ndarray, choice: int) -> dict[str, list]:
    """Return mean losses of [n, h + 1] (the mixture is last), and differences from ``choice``."""
    gaps = table[:, [choice]] - table
    errors = gaps.std(axis=0, ddof=1) / len(table) ** 0.5
    columns = {"mean": table.mean(axis=0), "worse by": gaps.mean(axis=0), "error": errors}
    return {"rows": len(table)} | {k: v.round(6).tolist() for k, v in columns.items()}


# ----------------------------------------------------------------------------- what came of it


def within_noise(judged: dict[str, list], noise: float = 1.0) -> bool:
    """Return whether no activation is better by more than the noise. The mixture is left out."""
    pairs = zip(judged["worse by"][:-1], judged["error"][:-1], strict=True)
    return all(gap <= noise * error + 1e-9 for gap, error in pairs)


def right(line: dict, by: str) -> bool:
    """Return whether the argmax is within a standard error of the best activation on test rows."""
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


def report(lines: list[dict], settings=(*SETTINGS, None)) -> str:
    """Report how often each rule says "discretize", and how often it is right; None: overall."""
    rows = []
    for group in GROUPS:
        own = harness.where(lines, group=group)
        for setting in settings:
            of_setting = [line for line in own if setting in (line["setting"], None)]
            for rule, says in RULES.items() if of_setting else ():
                yes = [line for line in of_setting if says(line)]
                shares = [share([right(line, by) for line in yes]) for by in ("loss", "error")]
                label = f"{group}: {setting or 'all'}"
                rows.append([label, rule, f"{len(yes)} of {len(of_setting)}", *shares])
    head = ["setting", "rule", 'says "discretize"', "right by loss", "right by error"]
    return harness.table(head, rows)


def totals(lines: list[dict]) -> str:
    """Report over all settings."""
    return report(lines, settings=(None,))


def share(outcomes: list[bool]) -> str:
    if not outcomes:
        return "-"
    p = sum(outcomes) / len(outcomes)
    return f"{100 * p:.0f} ± {100 * (p * (1 - p) / len(outcomes)) ** 0.5:.0f} %"


def main() -> None:
    flags = harness.command_line(__file__, __doc__, report)
    if flags.small:
        sizes = {"seeds": 3, "steps": 5, "inner_steps": 20}
        if flags.smoke:
            sizes = {"seeds": 2, "steps": 1, "inner_steps": 2, "width": 16}
            sizes |= dict.fromkeys(("train", "valid", "test"), 20)
        harness.finish(measure("digits, hinge", 0, **sizes), None, report)
        return
    done = harness.read(flags.results)
    for setting, block in BLOCKS:
        if not harness.where(done, setting=setting, block=block):
            harness.keep(flags.results, done, *measure(setting, block))
            print(setting, block, flush=True)
    harness.finish(done, flags.results, report, write_rows=False)


if __name__ == "__main__":
    main()
