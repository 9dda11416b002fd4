"""The built-in scores are listed in one place, and a new one takes few files."""

import ast
import collections
import os
import pathlib
import shutil
import subprocess
import sys

import ntk
from bilevel.cli.flags import commands
from bilevel.spaces.nasbench201 import scoring
from ntk.scores import registry

ROOT = pathlib.Path(__file__).parents[2]
NAMES = registry.builtin_score_names()


def sources():
    return [path for folder in ("bilevel", "ntk") for path in (ROOT / folder).rglob("*.py*")]


def words(path):
    """The names in the code of a file: identifiers, and strings that are no docstrings."""
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split() if id(node) not in docstrings else ()
        for field in "id", "attr", "name", "arg":
            if isinstance(word := getattr(node, field, None), str):
                yield word


def test_the_registry_names_the_public_functions_that_have_a_description():
    described = {
        name for name in ntk.scores.__all__ if "description" in vars(getattr(ntk.scores, name))
    }
    assert described == set(NAMES)
    assert set(scoring.SCORES) == set(commands.SCORES) == described | set(registry.HOST_SCORES)


def test_descriptions_name_functions_that_return_these_scores():
    for name in NAMES:
        about = registry.score_description(name)
        assert about.batch_norm in ("joint", "alone", "removed", "unused")
        assert about.together is None or callable(registry.score_program(about.together))


def test_a_builtin_score_is_named_in_at_most_three_files():
    """Its own, the stub, and one that uses it: a default, or a search that is built on it."""
    files, defined = collections.defaultdict(set), collections.Counter()
    for path in filter(lambda path: path.suffix in (".py", ".pyi"), sources()):
        for name in {*words(path)} & set(NAMES):
            files[name].add(path.relative_to(ROOT).as_posix())
        nodes = ast.walk(ast.parse(path.read_text()))
        defined.update(node.name for node in nodes if isinstance(node, ast.FunctionDef))
    # Other names are also those of searches, of functions of any matrix, of a column of `search`.
    own = [name for name in NAMES if defined[name] == 1 and name != "grad_norm"]
    assert len(own) > len(NAMES) / 2
    assert {name: sorted(files[name]) for name in own if len(files[name]) > 3} == {}


NEW = """
import jax.numpy as jnp
from ntk.scores.registry import ScoreDescription


@ScoreDescription("variance", gradients="none", batch_norm="joint", smaller_is_better=True)
def logit_variance(key, apply, params, batch):
    return jnp.var(apply(params, batch[0]))
"""


def test_rank_accepts_a_new_score_after_its_file_and_the_stub(tmp_path):
    shutil.copytree(ROOT / "ntk", tmp_path / "ntk", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "ntk" / "scores" / "new_family.py").write_text(NEW)
    with (tmp_path / "ntk" / "scores" / "__init__.pyi").open("a") as stub:
        stub.write("\nfrom .new_family import logit_variance\n")
    line = "rank --data digits --networks 3 --k 2 --pool 2 --batch-size 4 --cells 1 --channels 2"
    line += " --pixels 4 --scores logit_variance --no-judged --json --no-cache"
    done = subprocess.run(
        [sys.executable, "-m", "bilevel", *line.split(), "--out", str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert '"score": "logit_variance"' in done.stdout
