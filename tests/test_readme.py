"""The README's examples work when pasted."""

import pathlib
import re

from bilevel.spaces.darts import parse_genotype
from bilevel.spaces.nasbench201 import genotypes
from bilevel.spaces.nasbench201 import parse_genotype as parse_cell

EXAMPLES = re.findall(
    r"```python\n(.*?)```", (pathlib.Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL
)


def run(example, capsys):
    exec(compile(example, "README.md", "exec"), {})
    return capsys.readouterr().out


def test_the_first_example_runs_and_is_fifteen_lines_at_most(capsys):
    assert len(EXAMPLES[0].splitlines()) <= 15
    printed = run(EXAMPLES[0], capsys)
    assert "error_estimate" in printed
    before, after = map(float, printed.splitlines()[-1].split(" -> "))
    assert after < before


def test_the_kernel_example_runs_and_shows_every_name(capsys):
    (example,) = (e for e in EXAMPLES if "import ntk" in e or ", ntk" in e)
    names = """relu leaky_relu sigmoid tanh swish gelu erf identity activation dual network_kernel
        lemma1_kernel_as_printed mixture_blocks mixture_kernel empirical_kernel
        kernel_vector_product min_eigenvalue certified_min_eigenvalue certify_simplex
        kernel_regression excess_risk_term scores"""
    assert not [name for name in names.split() if f"ntk.{name}" not in example]
    printed = run(example, capsys)
    assert "converged=True" in printed
    value, bound = re.search(r"^(\S+) >= (\S+)$", printed, re.MULTILINE).groups()
    assert 0 < float(bound) <= float(value)


def test_the_deep_example_runs_and_finds_a_genotype(capsys):
    (example,) = (e for e in EXAMPLES if "darts_space" in e)
    found = parse_genotype(run(example, capsys))
    edges = {source for _, source in found.normal + found.reduce}
    assert len(edges) > 2  # a uniform alpha keeps the edges out of nodes 0 and 1


def test_the_train_free_example_runs_and_finds_a_genotype(capsys):
    (example,) = (e for e in EXAMPLES if "score_networks" in e)
    assert parse_cell(run(example, capsys).strip()) in genotypes()[-5:]


def test_the_feature_map_example_runs_and_finds_a_map_that_works(capsys):
    (example,) = (e for e in EXAMPLES if "baselines.weight_sharing" in e)
    printed = run(example, capsys)
    assert "[1 2 3 4 5]" in printed
    errors = re.findall(r"\[([\d. \n]+)\]", printed)[-1].split()
    assert float(errors[-1]) < 0.1


def test_the_theory_example_runs_and_its_verdicts_are_right(capsys):
    (example,) = (e for e in EXAMPLES if "condition_six" in e)
    printed = run(example, capsys)
    value, rows = re.search(r"value = (\S+)\n(?:  .*\n)+(\d+)\n", printed).groups()
    assert (float(value) > 0.05) == (int(rows) > 2000)
    assert "trust 1" in printed
    start = re.findall(r"\[([\d. ]+)\]", printed)[-1].split()
    assert float(start[1]) > 0.8
