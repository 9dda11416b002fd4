"""Verdicts on the papers' claims follow one rule, and tables of pages are made of today's rows."""

import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT

from benchmarks import harness, verdicts
from benchmarks.deep_search import activation_skip_tables
from tools import tables

RUNS, LAYERS = 3, 9
GRADES = verdicts.REPRODUCED, verdicts.IN_PART, verdicts.NOT, verdicts.NOT_TESTED
CLAIMS = [  # functions with verdicts; those of the feature maps are on two pages
    "papers/claims.theory",
    "papers/claims.feature_maps",
    "papers/claims.learned_images",
    "deep_search/activation_skip_tables.verdict_table",
    "deep_search/darts_gap.claim_table",
    "deep_search/eigenvalue_depth.verdict_table",
    "theory/lipschitz.verdict_lines",
]


@pytest.mark.parametrize(
    "gains, same, expected",
    [
        ([1.0, 1.1, 0.9], True, 0),  # beyond two standard errors
        ([1.0, 1.1, 0.9], False, 1),  # at another setting
        ([1.0, 1.1], True, 1),  # too few runs
        ([1.0, 3.0, -1.0], True, 1),  # the claimed sign, within the noise
        ([-1.0, -3.0, 1.0], True, 2),  # the other sign
        ([0.0, 0.0, 0.0], True, 2),
        ([1.0], True, 1),
        ([], True, 3),
    ],
)
def test_the_rule(gains, same, expected):
    assert verdicts.grade_gains(gains, papers_setting=same) == GRADES[expected]


def test_a_nan_has_no_verdict():
    with pytest.raises(ValueError, match="gains: expected finite values"):
        verdicts.grade_gains([1.0, np.nan, 2.0], papers_setting=True)


def pages():
    return {path: path.read_text() for path in sorted(ROOT.glob("docs/**/*.md"))}


@pytest.mark.parametrize("function", CLAIMS)
def test_verdicts_on_the_pages_follow_from_the_rows(function):
    blocks = [
        match
        for text in pages().values()
        for match in tables.MARKED.finditer(text)
        if f"{match['folder']}/{match['script']}.{match['function']}" == function
    ]
    assert blocks
    for block in blocks:
        assert tables.made(block) == block[0]


def test_pages_hold_no_other_verdicts():
    for path, text in pages().items():
        prose = tables.MARKED.sub("", text)
        assert not re.search(r"\bnot reproduced\b|\breproduced:|: reproduced\b", prose), path
        for block in tables.MARKED.finditer(text):
            if "eproduced" in block["table"]:
                name = f"{block['folder']}/{block['script']}.{block['function']}"
                assert name in {*CLAIMS, "papers/claims.rule"}, path


def as_in_the_paper():
    """Probabilities [runs, layers, 5] and skips [runs, 8] of Figure 1, with a little noise."""
    rng = np.random.default_rng(0)
    lead = np.linspace(1, 0, LAYERS)[:, None] * np.array([0.3, 0.25, -0.1, -0.2, -0.25])
    lead[-1] = [2e-3, 1e-3, -1e-3, -1e-3, -1e-3]
    noise = 1e-4 * rng.normal(size=(RUNS, LAYERS, 5))
    return 0.2 + lead / 2 + noise, 0.9 + 0.01 * rng.normal(size=(RUNS, LAYERS - 1))


def grades(p, skips, papers=True):
    of_findings, _ = activation_skip_tables.findings(p, skips, papers)
    return [GRADES.index(verdict) for verdict in of_findings]


def test_each_finding_has_its_own_verdict():
    p, skips = as_in_the_paper()
    assert grades(p, skips) == [0, 0, 0]
    assert grades(p, skips, papers=False) == [1, 1, 1]
    other = p.copy()
    other[:, 4, 0], other[:, 4, 2] = p[:, 4, 2], p[:, 4, 0]  # a sigmoid in one layer
    assert grades(other, skips)[0] == 1
    assert grades(p[..., ::-1], skips)[0] == 2
    assert grades(np.concatenate([p[:, :-1], p[:, 3:4]], axis=1), skips)[1] == 1  # not flat
    assert grades(p[:, ::-1], skips)[1] == 2
    assert grades(p, np.where(np.arange(LAYERS - 1) < 3, 0.2, skips))[2] == 1
    assert grades(p, 1 - skips)[2] == 2


def test_the_search_nearest_to_the_paper_comes_first():
    rows = harness.read(harness.RESULTS / "activation_skip_search_full.jsonl")
    head = activation_skip_tables.verdict_table(rows).splitlines()[0]
    assert "nearest to the paper" in head.split("|")[2]


SCRIPT = ROOT / "tools/tables.py"
TABLE = "<!-- table: hypergradients/memory.report -->\n{}<!-- end of table -->\n"


def run_tables(*flags):
    # A separate process, because some benchmarks change the precision.
    return subprocess.run([sys.executable, SCRIPT, *flags], capture_output=True, text=True)


def test_tables_state_the_commit_of_their_rows():
    for path in sorted(ROOT.glob("docs/*.md")):
        for block in tables.MARKED.finditer(path.read_text()):
            rows = harness.read(harness.RESULTS / f"{block['file'] or block['script']}.jsonl")
            if rows:
                line = tables.AGE.search(block["table"])
                assert line, f"{path.name}, {block['function']}: run `make tables`"
                assert line[1] in {row.get("commit") for row in rows}, path


@pytest.mark.slow
def test_every_table_is_made_of_its_results():
    done = run_tables("--check")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_table_that_was_typed_is_found_and_written_anew(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before\n\n" + TABLE.format("| temporaries | 1 MB |\n") + "\nafter\n")
    assert run_tables("--check", page).returncode == 1
    assert "1 MB" in page.read_text()
    assert run_tables(page).returncode == 0
    text = page.read_text()
    assert "| lax.scan, reverse |" in text and "1 MB" not in text
    assert text.startswith("before\n\n<!--") and text.endswith("-->\n\nafter\n")
    assert run_tables("--check", page).returncode == 0


def test_a_table_without_its_comments_raises(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("<!-- table: hypergradients/memory.report a b -->\n")
    done = run_tables(page)
    assert done.returncode == 1 and "page.md: expected each table's comments" in done.stderr
