"""Write the title and the first code cell of every notebook; the cell installs bilevel in Colab.

    python notebooks/first_cells.py

The address of the repository is ``Repository`` among ``project.urls`` in pyproject.toml. Without
it the notebooks have no badge, and install bilevel from a wheel in their folder.
"""

import tomllib
from pathlib import Path

import nbformat

HERE = Path(__file__).parent
BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
FROM_WHEEL = (
    "If bilevel is not installed, as in Colab, the next cell installs it from a wheel "
    "`bilevel-*.whl`. Put the wheel into the folder of this notebook first (in Colab: into the "
    "files of the session). `pip wheel --no-deps .` in the repository makes a wheel."
)
# pip does not accept extras after a pattern, so matplotlib has its own name.
INSTALL = """import importlib.util

if importlib.util.find_spec("bilevel") is None:
    %pip install -q {packages}
elif importlib.util.find_spec("matplotlib") is None:
    %pip install -q matplotlib"""


def repository() -> str | None:
    """Return ``https://github.com/owner/name``, or None if pyproject.toml has no address."""
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    return project.get("urls", {}).get("Repository")


def first_cells(title: str, file: str, repository: str | None) -> tuple[str, str]:
    """Return the text of the first cell, which begins with `title`, and of the code cell."""
    if repository is None:
        return f"{title}\n\n{FROM_WHEEL}", INSTALL.format(packages="matplotlib bilevel-*.whl")
    path = repository.removeprefix("https://github.com/")
    link = f"https://colab.research.google.com/github/{path}/blob/main/notebooks/{file}"
    package = f'"bilevel[plots] @ git+{repository}"'
    return f"{title}\n\n[![Open in Colab]({BADGE})]({link})", INSTALL.format(packages=package)


def write(path: Path, repository: str | None) -> None:
    """Write the first two cells of a notebook. The other cells and all outputs stay."""
    notebook = nbformat.read(path, as_version=4)
    head, install = notebook.cells[:2]
    title = head.source.partition("\n")[0]
    head.source, install.source = first_cells(title, path.name, repository)
    nbformat.write(notebook, path)


if __name__ == "__main__":
    for path in sorted(HERE.glob("*.ipynb")):
        write(path, repository())
