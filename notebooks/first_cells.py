"""Writes the title and the first code cell of every notebook: where Colab gets it and bilevel from.

    python notebooks/first_cells.py

The repository's address is set in one place, ``Repository`` among ``project.urls`` in
pyproject.toml. While it is not there, nothing points at a repository: there is no badge, and the
notebooks install bilevel from a wheel beside them.
"""

import tomllib
from pathlib import Path

import nbformat

HERE = Path(__file__).parent
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
FROM_WHEEL = (
    "Where bilevel is not installed, as in Colab, the next cell installs it from a wheel, "
    "`bilevel-*.whl`, that has to be beside this notebook first (in Colab: among the files of the "
    "session); `pip wheel --no-deps .` in the repository makes one."
)
# Not bilevel[plots], which cannot be said of a pattern; neither needs TensorFlow.
INSTALL = """import importlib.util

if importlib.util.find_spec("bilevel") is None:
    %pip install -q {packages}
elif importlib.util.find_spec("matplotlib") is None:
    %pip install -q matplotlib"""


def repository() -> str | None:
    """``https://github.com/owner/name``, or None while there is none."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository")


def first_cells(title: str, file: str, repository: str | None) -> tuple[str, str]:
    """The title's cell, of which `title` is the first line, and the code cell after it."""
    if repository is None:
        return f"{title}\n\n{FROM_WHEEL}", INSTALL.format(packages="matplotlib bilevel-*.whl")
    path = repository.removeprefix("https://github.com/")
    link = f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{file}"
    package = f'"bilevel[plots] @ git+{repository}"'
    return f"{title}\n\n[![Open in Colab]({BADGE})]({link})", INSTALL.format(packages=package)


def write(path: Path, repository: str | None) -> None:
    """The first two cells of one notebook; the others, and all outputs, stay."""
    notebook = nbformat.read(path, as_version=4)
    head, install = notebook.cells[:2]
    title = head.source.partition("\n")[0]
    head.source, install.source = first_cells(title, path.name, repository)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        write(path, repository())
