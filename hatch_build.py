# SPDX-License-Identifier: Apache-2.0
"""The README as PyPI shows it: links to files lead to the repository that the release is built in."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

#: Of a link or picture, and of HTML: what stands before the name of a file.
LINK = re.compile(r'(!?\[[^\]]*\]\(|(?:src|href|srcset)=")(?![a-z]+:|#)([^)"\s]+)')

#: Where links are to be shown, and where they are to be fetched.
SHOWN, FETCHED = "blob", "raw"

PICTURES = (".png", ".svg", ".gif")


class ReadmeHook(MetadataHookInterface):
    """Used by hatchling."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Give the README."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": absolute(text, os.environ)}


def absolute(text: str, environ: Mapping[str, str]) -> str:
    """With whole addresses, in a workflow of GitHub, which knows them. Elsewhere it stays as it is."""
    names = ("GITHUB_SERVER_URL", "GITHUB_REPOSITORY", "GITHUB_REF_NAME")
    server, repository, ref = (environ.get(name, "") for name in names)
    if not (server and repository and ref):
        return text

    def whole(found: re.Match[str]) -> str:
        kind = FETCHED if found[2].endswith(PICTURES) else SHOWN
        return f"{found[1]}{server}/{repository}/{kind}/{ref}/{found[2]}"

    return LINK.sub(whole, text)
