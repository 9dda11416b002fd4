"""The built-in scores are listed in one place, and `bilevel rank` accepts a new one."""

import os
import shutil

import pytest
from helpers import ROOT, run

import ntk
from bilevel.cli.flags import commands
from bilevel.spaces.nasbench201 import scoring
from ntk.scores import registry

NAMES = registry.builtin_score_names()


def test_the_registry_names_the_public_functions_that_have_a_description():
    public = {name: vars(getattr(ntk.scores, name)) for name in ntk.scores.__all__}
    described = {name for name, variables in public.items() if "description" in variables}
    assert described == set(NAMES)
    assert set(scoring.SCORES) == set(commands.SCORES) == described | set(registry.HOST_SCORES)


def test_descriptions_name_functions_that_return_these_scores():
    for name in NAMES:
        about = registry.score_description(name)
        assert about.batch_norm in ("joint", "alone", "removed", "unused")
        assert about.together is None or callable(registry.score_program(about.together))


NEW = """
import jax.numpy as jnp
from ntk.scores.registry import ScoreDescription


@ScoreDescription("variance", gradients="none", batch_norm="joint", smaller_is_better=True)
def logit_variance(key, apply, params, batch):
    return jnp.var(apply(params, batch[0]))
"""


@pytest.mark.long
def test_rank_accepts_a_new_score_after_its_file_and_the_stub(tmp_path):
    shutil.copytree(ROOT / "ntk", tmp_path / "ntk", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ntk" / "scores" / "new_family.py").write_text(NEW)
    with (tmp_path / "ntk" / "scores" / "__init__.pyi").open("a") as stub:
        stub.write("\nfrom .new_family import logit_variance\n")
    line = "rank --data digits --networks 3 --k 2 --pool 2 --batch-size 4 --cells 1 --channels 2"
    line += " --pixels 4 --scores logit_variance --no-judged --json --no-cache"
    printed = run(
        *("python", "-m", "bilevel", *line.split(), "--out", tmp_path / "run"),
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
    )
    assert '"score": "logit_variance"' in printed
