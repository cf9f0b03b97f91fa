# SPDX-License-Identifier: Apache-2.0
"""The README as PyPI shows it: links to files lead to the repository that the release is made of."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Of a link or picture, and of HTML: what stands before the name of a file.
LINK = re.compile(r'(!?\[[^\]]*\]\(|(?:src|href|srcset)=")(?![a-z]+:|#)([^)"\s]+)')

#: Where files of a release are, as ``https://github.com/owner/name/blob/v1.2.3``. Only a release says it.
FILES = "README_LINKS"

PICTURES = (".png", ".svg", ".gif")


class ReadmeHook(MetadataHookInterface):
    """Used by hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Give the README."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(text, os.environ.get(FILES, "")),
        }


def absolute(text: str, files: str) -> str:
    """With whole addresses, where these are known. Pictures have addresses from which they can be fetched."""
    if not files:
        return text

    def whole(found: re.Match[str]) -> str:
        base = files.replace("/blob/", "/raw/", 1) if found[2].endswith(PICTURES) else files
        return f"{found[1]}{base}/{found[2]}"

    return LINK.sub(whole, text)
