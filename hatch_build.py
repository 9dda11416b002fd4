"""Build step: make the README's relative links absolute, for the page of a package index.

hatchling runs it (``tool.hatch.metadata.hooks.custom`` in pyproject.toml). The address is
``urls.Repository`` there. Without an address the README stays unchanged.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")


class ReadmeHook(MetadataHookInterface):
    """Set the dynamic field ``readme``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the README's text to the project's ``metadata``."""
        root = Path(self.root)
        text = (root / "README.md").read_text(encoding="utf-8")
        repository = metadata.get("urls", {}).get("Repository")
        if repository:
            text = absolute(text, repository, root)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, root: Path) -> str:
    """Replace links to files under ``root`` by their addresses in the ``repository``.

    Images need the file itself (``/raw/``), other links the page that shows it (``/blob/``).
    """

    def link(match: re.Match[str]) -> str:
        figure, label, target = match.groups()
        if not (root / target.partition("#")[0]).exists() or target.startswith("#"):
            return match[0]  # an address, a place on this page, or code like `table[i](x)`
        kind = "raw" if figure else "blob"
        return f"{figure}[{label}]({repository.rstrip('/')}/{kind}/main/{target})"

    return _LINK.sub(link, text)
