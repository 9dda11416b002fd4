"""Configuration of the documentation: ``make docs``. Nothing is fetched from the network."""

import importlib.metadata
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(ROOT), str(HERE / "_ext")]

project = "bilevel"
author = "The bilevel developers"
copyright = author
try:
    release = importlib.metadata.version("bilevel")
except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
    release = ""

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "myst_nb",
    "sphinx_copybutton",
    "api_listing",
    "mathml",
]
exclude_patterns = ["_build"]
templates_path = []

# Markdown and notebooks. Notebooks are shown with their stored outputs.
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # otherwise myst-nb loads them from the network
suppress_warnings = ["mystnb.unknown_mime_type"]

# Docstrings are in numpydoc format. A default value is shown as written in the source.
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
autosummary_generate = False
autodoc_preserve_defaults = True
autodoc_typehints = "none"  # the docstrings state the types
autodoc_member_order = "bysource"
add_module_names = False

html_theme = "furo"
html_title = "bilevel"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "_ext" / "search_scores.js")
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def _gallery():
    """Copy the notebooks into docs/gallery, without the cells that are for Colab only."""
    folder = HERE / "gallery"
    folder.mkdir(exist_ok=True)
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        notebook = json.loads(path.read_text())
        head, _install, *cells = notebook["cells"]
        head["source"] = head["source"][:1]
        notebook["cells"] = [head, *cells]
        text = json.dumps(notebook).replace("](../docs/", "](../")
        copy = folder / path.name
        if not copy.exists() or copy.read_text() != text:  # Sphinx compares modification times
            copy.write_text(text)


def setup(app):
    """Redirect links to notebooks, which are correct in the repository, to the gallery."""

    def to_the_gallery(app, page, source):
        source[0] = source[0].replace("](../notebooks/", "](gallery/")

    app.connect("source-read", to_the_gallery)


_gallery()
