"""The package: links of its README, licences, and what its import costs; test_install builds it."""

import importlib.util
import pathlib
import re
import sys
import tomllib
import types

import pytest

from bilevel.plots import appearance

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADDRESS = "https://example.org/owner/name"


@pytest.fixture
def readme(monkeypatch):
    """The text by ``hatch_build.py``, which needs of hatchling only the class that it extends."""
    module = types.ModuleType("hatchling.metadata.plugin.interface")
    module.MetadataHookInterface = type("Interface", (), {"root": str(ROOT)})
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step)

    def text(**metadata):
        step.ReadmeHook().update(metadata)
        assert metadata["readme"]["content-type"] == "text/markdown"
        return metadata["readme"]["text"]

    return text


def test_every_link_of_the_readme_is_absolute_once_there_is_an_address(readme):
    text = (ROOT / "README.md").read_text()
    built = readme(urls={"Repository": ADDRESS + "/"})
    assert readme() == text
    prose = re.sub(r"(?s)```.*?```", "", text)
    relative = re.findall(r"(!?)\[[^\]]*\]\((?!https?:)([^)\s]+)\)", prose)
    assert len(relative) > 20
    for figure, target in relative:
        assert f"]({ADDRESS}/{'raw' if figure else 'blob'}/main/{target})" in built
    assert built.count(ADDRESS) == len(relative)
    # Nothing else is changed.
    assert re.sub(rf"{ADDRESS}/(raw|blob)/main/", "", built) == text


def test_the_licence_of_every_file_that_is_shipped_is_stated():
    tables = sorted((ROOT / "bilevel").rglob("*.xz"))
    assert {path.parent for path in tables} == {ROOT / "bilevel/spaces/nasbench201/judging/tables"}
    assert PROJECT["license"] == "Apache-2.0 AND MIT"
    texts = [(ROOT / name).read_text() for name in PROJECT["license-files"]]
    assert "Apache License" in texts[0] and "MIT License" in texts[1]
    sources = (ROOT / "bilevel/spaces/nasbench201/judging/tables/README.md").read_text()
    for holder in re.findall(r"MIT, (Copyright \(c\) [^|]*?) *\|", sources):
        assert holder in texts[1]


def test_the_message_without_matplotlib_names_a_project_of_the_index(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.rcsetup", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"install it with `pip install matplotlib`\.$"):
        appearance.pyplot()


def test_no_message_asks_to_install_this_package_from_an_index():
    for folder in ("bilevel", "ntk"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"pip install [^`\n]*\b(bilevel|ntk)\b", path.read_text()), path
