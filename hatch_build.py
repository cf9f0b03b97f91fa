# SPDX-License-Identifier: Apache-2.0
"""Build hook: give the README on PyPI links into the repository of the release."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: The start of a Markdown link or image, or of an HTML attribute, and the relative path that follows.
LINK = re.compile(r'(!?\[[^\]]*\]\(|(?:src|href|srcset)=")(?![a-z]+:|#)([^)"\s]+)')

#: Environment variable with the base URL of the release's files, such as
#: ``https://github.com/owner/name/blob/v1.2.3``. Only the release workflow sets it.
FILES = "README_LINKS"

PICTURES = (".png", ".svg", ".gif")


class ReadmeHook(MetadataHookInterface):
    """Metadata hook that hatchling calls."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set the project's description to the README."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, os.environ.get(FILES, "")),
        }


def absolute(text: str, files: str) -> str:
    """Make relative links absolute if ``files`` is set; images get URLs of the raw file."""
    if not files:
        return text

    def replace(found: re.Match[str]) -> str:
        base = files.replace("/blob/", "/raw/", 1) if found[2].endswith(PICTURES) else files
        return f"{found[1]}{base}/{found[2]}"

    return LINK.sub(replace, text)
