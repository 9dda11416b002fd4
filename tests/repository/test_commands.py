"""Documented commands are accepted by the parser of the script that they name; nothing is run."""

import ast
import contextlib
import functools
import io
import itertools
import json
import re
import shlex

import pytest
from helpers import ROOT, run

from bilevel.cli import parse_flags
from bilevel.cli.flags import from_config_file

FOLDERS = "benchmarks", "tools"
# Their scripts by file name, relative to the root.
SCRIPTS = {
    path.name: str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
}
SOURCES = "bilevel", "ntk", *FOLDERS, "examples"
# Plausible values for these words.
PLACEHOLDERS = {"MODULE:FUNCTION": "own_space:looks", "COMMAND": "search", "NAME": "denoising"}
PLACEHOLDERS |= {"FILE": "file", "FOLDER": "folder", "PATH": "folder", "N": "2", "I": "3"}
ENDS = {"|", "||", "&&", ";", ">", ">>", "2>", "&"}
START = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S+ +)*(?:taskset -c [\d,]+ +)?(?:\S*/)?"
    r"(?P<command>python[\d.]* +(?:-m bilevel"
    r"|(?:-\S+ +)*(?:benchmarks(?:/\w+)?|tools|examples)/\w+\.py)"
    r"|bilevel +(?=[\w-])(?!=)|make +(?=[a-z])|\w+\.py +(?=--))"
)

# Runs in a separate process, because benchmarks choose JAX's precision.
PROGRAM = """
import argparse, contextlib, importlib, io, json, runpy, sys

class Accepted(BaseException):
    pass

plain = argparse.ArgumentParser.parse_args

def parse_args(self, *args, **options):
    plain(self, *args, **options)
    raise Accepted

argparse.ArgumentParser.parse_args = parse_args
root, commands = sys.argv[1], json.loads(sys.stdin.read())
answers = []
for script, *arguments in commands:
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    sys.argv, said = [script, *arguments], io.StringIO()
    whole = lambda: runpy.run_path(f"{root}/{script}", run_name="__main__")
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            getattr(module, "main", whole)()
        answers.append("expected main() to ask a parser, got none")
    except Accepted:
        answers.append("")
    except SystemExit as end:
        lines = [*said.getvalue().splitlines(), str(end)]
        errors = [line for line in lines if "error:" in line]
        answers.append("" if end.code in (0, None) else (errors or lines)[0])
print(json.dumps(answers))
"""


def commands_in(text):
    """The commands of Markdown or a docstring: in lines of a block and in spans of code."""
    text = re.sub(r"\\\n\s*", " ", text)
    fenced = "\n".join(re.findall(r"```.*?\n(.*?)```", text, re.S)).splitlines()
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    spans = re.findall(r"(`{1,2})(?!`)(.+?)\1(?!`)", text, re.S)
    indented = re.findall(r"^(?: {4}|\t)(.*)", text, re.M)
    for line in (*fenced, *indented, *(" ".join(span.split()) for _, span in spans)):
        if match := START.match(line.strip()):
            start = match["command"].strip()
            if not start.endswith(".py") or " " in start or start in SCRIPTS:
                yield line.strip()[match.start("command") :]


def words_of(command):
    """The words of a command, with plausible values and without its comment."""
    command = re.sub(r"\$\(.*?echo (.*?)\)", r"\1", command).replace("`", "")
    words = shlex.split(re.sub(r"\s+#.*", "", command))
    words = list(itertools.takewhile(lambda word: word not in ENDS, words))
    words = [word.strip("[]") if not word.startswith("$[") else word for word in words]
    words = [PLACEHOLDERS.get(word, word.removeprefix("$")) for word in words]
    return [word for word in words if word not in ("...", "…", "")]


def texts():
    """Every text that may have commands, by where it is."""
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/**/*.md"):
        for path in sorted(ROOT.glob(pattern)):
            if "_build" not in path.parts:
                yield path, path.read_text()
    makefile = (ROOT / "Makefile").read_text().replace("$(BIN)/", "")
    yield ROOT / "Makefile", re.sub(r"\$\(\w+\)", "", makefile)
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path, "\n".join(docstrings(path))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(path.read_text())["cells"]
        yield path, "\n\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")


def docstrings(path):
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


@functools.cache
def documented():
    """``[(place, command)]``, each command once for each file."""
    pairs = ((path, command) for path, text in texts() for command in commands_in(text))
    return [(str(path.relative_to(ROOT)), command) for path, command in dict.fromkeys(pairs)]


def sort_of(command):
    first, *others = command.split()
    if first in ("bilevel", "make"):
        return first
    if first.endswith(".py"):
        return "benchmarks"
    script = next((word for word in others if word.endswith(".py")), "")
    folder = script.split("/")[0] if script else "bilevel"
    return "benchmarks" if folder in FOLDERS else folder


def ask_benchmarks(commands):
    """By the scripts' own parsers, in one process."""
    calls = []
    for words in commands:
        at = next(i for i, word in enumerate(words) if word.endswith(".py"))
        calls.append([SCRIPTS.get(words[at], words[at]), *words[at + 1 :]])
    exist = [(ROOT / call[0]).is_file() for call in calls]
    known = [call for call, there in zip(calls, exist, strict=True) if there]
    printed = run("python", "-W", "ignore", "-c", PROGRAM, ROOT, input=json.dumps(known))
    answers = iter(json.loads(printed.splitlines()[-1]))
    return [next(answers) if there else "expected a script, got none" for there in exist]


def ask_bilevel(commands):
    answers = []
    for words in commands:
        arguments = words[1:] if words[0] == "bilevel" else words[words.index("bilevel") + 1 :]
        answers.append("")
        if not arguments or "--version" in arguments:  # `bilevel ...` names no command
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                parse_flags(arguments)
        except SystemExit as end:  # --help
            answers[-1] = "" if not end.code else str(end)
        except ValueError as error:
            answers[-1] = str(error)
    return answers


def ask_make(commands):
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    return ["" if words[1] in targets else f"no target {words[1]}" for words in commands]


def ask_examples(commands):
    """The scripts there take no flags, so each command ends in a script."""
    existing = [words[-1].endswith(".py") and (ROOT / words[-1]).is_file() for words in commands]
    return ["" if there else "expected a script without flags" for there in existing]


# How parsers are asked about the commands of a sort, and how many there are at least.
ASK = {
    "benchmarks": (ask_benchmarks, 60),
    "bilevel": (ask_bilevel, 40),
    "make": (ask_make, 15),
    "examples": (ask_examples, 0),
}


@pytest.mark.parametrize("sort", ASK)
def test_a_documented_command_is_accepted(sort, monkeypatch):
    # A documented configuration file is not there.
    monkeypatch.setattr(from_config_file, "values", lambda path, kind: {})
    ask, least = ASK[sort]
    chosen = [(place, command) for place, command in documented() if sort_of(command) == sort]
    assert len(chosen) >= least
    answers = ask([words_of(command) for _, command in chosen])
    refused = [(*pair, answer) for pair, answer in zip(chosen, answers, strict=True) if answer]
    assert not refused, "\n".join(map(": ".join, refused))
