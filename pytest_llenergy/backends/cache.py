# SPDX-License-Identifier: Apache-2.0
"""Models that were built here, kept in the user's cache directory and used by every process.

An entry is a directory that appears whole or not at all, with the checksum of each of its files. It is
built by one process while the others wait for it.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec

from pytest_llenergy.errors import ModelError
from pytest_llenergy.model.places import cache_root

MANIFEST = "llenergy-checksums.json"


def file_digest(path: Path) -> str:
    """BLAKE2b of a file, 128 bits in hexadecimal."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def cached(name: str, build: Callable[[Path], None]) -> Path:
    """The directory ``name`` of the cache, built by ``build(directory)`` if it is missing or damaged.

    Raises ``ModelError`` when the cache cannot be written.
    """
    from filelock import FileLock

    root = cache_root() / "models"
    entry = root / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / f"{name}.lock"):
            if not _intact(entry):
                _build(entry, build)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted model in {root} ({error}); set LLENERGY_CACHE_DIR to a directory "
            "with room"
        ) from error
    return entry


class _File(msgspec.Struct, frozen=True):
    size: int
    mtime_ns: int
    digest: str


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{entry.name}-", dir=entry.parent))
    try:
        build(scratch)
        files = sorted(path for path in scratch.rglob("*") if path.is_file())
        manifest = {str(path.relative_to(scratch)): _describe(path) for path in files}
        (scratch / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        if entry.exists():
            shutil.rmtree(entry)
        scratch.rename(entry)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _describe(path: Path) -> _File:
    state = path.stat()
    return _File(state.st_size, state.st_mtime_ns, file_digest(path))


def _intact(entry: Path) -> bool:
    try:
        manifest = msgspec.json.decode((entry / MANIFEST).read_bytes(), type=dict[str, _File])
        return all(_unchanged(entry / name, file) for name, file in manifest.items())
    except (OSError, msgspec.DecodeError):
        return False


def _unchanged(path: Path, file: _File) -> bool:
    """Untouched since it was built, or else still of the same content."""
    state = path.stat()
    if state.st_size != file.size:
        return False
    return state.st_mtime_ns == file.mtime_ns or file_digest(path) == file.digest
