"""The examples of the README and of the documentation work when pasted, page by page."""

import pathlib
import re

import jax.numpy as jnp
import pytest
from helpers import ROOT, hypergradient, long_except
from problems import follower

import bilevel
from bilevel.spaces.darts import parse_genotype
from bilevel.spaces.nasbench201 import genotypes
from bilevel.spaces.nasbench201.genotype import parse_genotype as parse_cell

CORE = "docs/index.md", "docs/how_to.md", "docs/geometry.md", "docs/constraints.md"
CORE += ("docs/scaling.md",)
# The notebook on own images runs the same functions as the page on own data.
LONG = "docs/start.md", "docs/own_data.md", "docs/solvers.md", "docs/stochastic.md"
COMING_FROM = sorted(f"docs/coming_from/{p.name}" for p in (ROOT / "docs/coming_from").glob("*.md"))


def examples(page):
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def ours(page):
    """Return the code in the second column of the tables that compare a library with ours."""
    expressions, inside = [], False
    for line in (ROOT / page).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            inside = False
        elif cells[1] in ("bilevel", "ntk"):
            inside = True
        elif inside:
            expressions += re.findall(r"`([^`]+)`", cells[1])
    return expressions


def session_of(page):
    session = {}
    for example in examples(page):
        exec(compile(example, page, "exec"), session)
    return session


def run(page, capsys):
    session_of(page)
    return capsys.readouterr().out


def test_every_page_with_examples_is_run_here():
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    source = pathlib.Path(__file__).read_text()
    assert [page for page in pages if examples(page) and f'"{page}"' not in source] == []


def test_the_readme_has_at_most_150_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


def test_messages_of_the_troubleshooting_page_are_in_the_source():
    paths = [path for package in ("bilevel", "ntk") for path in (ROOT / package).rglob("*.py")]
    source = "\n".join(path.read_text() for path in paths)
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # literals over several lines
    titles = re.findall(r"^## (.*)$", (ROOT / "docs/troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for title in titles for message in re.findall(r'"(.+?)"', title)]
    assert len(messages) >= 10
    assert [message for message in messages if message not in source] == []


@pytest.mark.slow
def test_the_examples_of_the_readme_run_and_print_what_it_shows(capsys):
    assert all(len(example.splitlines()) <= 20 for example in examples("README.md"))
    printed = run("README.md", capsys)
    before, after = map(float, re.search(r"loss (\S+) -> (\S+)$", printed, re.M).groups())
    assert after < before
    assert re.search(r"converged +no: the error is over 1 % of the norm", printed)
    assert float(re.search(r"accuracy of the mixture (\S+)", printed)[1]) > 0.6
    assert len(re.findall(r"\('\w+', [01234]\)", printed)) == 8
    bounds = re.findall(r"lambda_min >= (\S+)", printed)
    assert len(bounds) == 2 and all(float(bound) > 1 for bound in bounds)


@pytest.mark.long
def test_the_solver_and_the_inverse_of_contributing_are_right():
    session = session_of("CONTRIBUTING.md")
    problem = follower(lambda w, alpha, batch: jnp.sum((w - batch) ** 2))
    richardson = bilevel.implicit(bilevel.newton(), session["richardson"](0.5, 60))
    for solver in (session["sign_descent"](0.1, 50), richardson):
        start = jnp.ones(2), jnp.zeros(2), None, jnp.full(2, 3.0)
        hyper = hypergradient(problem, solver, *start, diagnostics=True)
        assert hyper.grad == pytest.approx([-4.0, -4.0], rel=1e-5)
        assert hyper.info.error_estimate < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("page", long_except(CORE, [*CORE, *LONG]))
def test_the_pages_of_the_core_run(page, capsys):
    assert run(page, capsys)


@pytest.mark.long
@pytest.mark.parametrize("page", COMING_FROM)
def test_our_column_of_every_coming_from_page_runs(page):
    """The page's example defines the names, and its tables have expressions of them."""
    session, expressions = session_of(page), ours(page)
    assert len(expressions) >= 10
    for expression in expressions:
        assert eval(expression, session) is not None


@pytest.mark.long
def test_the_space_of_the_users_own_runs_and_finds_a_view(capsys):
    first, second, third = run("docs/spaces.md", capsys).splitlines()
    assert first.split()[0] in ("pixels", "blur", "edges", "inverse")
    assert "--" in second and third in ("pixels", "blur", "edges", "inverse")


@pytest.mark.long
def test_the_kernel_examples_run_and_show_every_name(capsys):
    example = "\n".join(examples("docs/kernels.md"))
    names = """relu leaky_relu sigmoid tanh swish gelu erf identity activation dual network_kernel
        lemma1_kernel_as_printed mixture_blocks mixture_kernel empirical_kernel
        kernel_vector_product min_eigenvalue certified_min_eigenvalue certify_simplex
        kernel_regression excess_risk_term scores posterior ensemble neural_tangents"""
    assert not [name for name in names.split() if f"ntk.{name}" not in example]
    printed = run("docs/kernels.md", capsys)
    assert "converged   yes" in printed
    value, bound = re.search(r"^(\S+) >= (\S+)$", printed, re.MULTILINE).groups()
    assert 0 < float(bound) <= float(value)


@pytest.mark.long
def test_the_deep_example_runs_and_finds_a_genotype(capsys):
    text, error = run("docs/deep_search.md", capsys).splitlines()
    genotype = parse_genotype(text)
    operations = {name for name, _ in genotype.normal + genotype.reduce}
    assert operations == {"skip_connect", "max_pool_3x3"}  # a uniform alpha keeps the first of them
    assert 0 <= float(error) <= 1


@pytest.mark.long
def test_the_train_free_example_runs_and_finds_a_genotype(capsys):
    assert parse_cell(run("docs/train_free.md", capsys).strip()) in genotypes()[-5:]


@pytest.mark.long
def test_the_feature_map_example_runs_and_finds_a_map_that_works(capsys):
    printed = run("docs/feature_maps.md", capsys)
    assert "[1 2 3 4 5]" in printed
    assert float(re.findall(r"\[([\d. \n]+)\]", printed)[-1].split()[-1]) < 0.1


@pytest.mark.long
def test_the_theory_example_runs_and_its_verdicts_are_right(capsys):
    printed = run("docs/theory.md", capsys)
    value, rows = re.search(r"value = (\S+)\n(?:  .*\n)+(\d+)\n", printed).groups()
    assert (float(value) > 0.05) == (int(rows) > 2000)
    assert "trust 1" in printed
    assert float(re.findall(r"\[([\d. ]+)\]", printed)[-1].split()[1]) > 0.8
