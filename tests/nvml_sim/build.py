# SPDX-License-Identifier: Apache-2.0
"""Build the stand-in with the system's C compiler."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
SOURCES = Path(__file__).with_name("library")
FLAGS = (
    "-std=c11",
    "-shared",
    "-fPIC",
    "-fvisibility=hidden",
    "-O2",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
)


class BuildError(RuntimeError):
    """The stand-in could not be compiled; the message holds the compiler's output."""


def build_library(directory: str | os.PathLike[str]) -> Path:
    """Compile the stand-in into `directory` and return the library's path.

    A library already there is reused if it came from the same sources and flags. The result appears
    by renaming, so parallel test workers may share one directory.
    """
    target = Path(directory) / SONAME
    stamp = target.with_suffix(".stamp")
    digest = _digest()
    if target.exists() and stamp.exists() and stamp.read_text() == digest:
        return target
    compiler = shutil.which("cc")
    if compiler is None:
        raise BuildError("no C compiler: `cc` is not on PATH")
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{SONAME}.{os.getpid()}")
    command = [compiler, *FLAGS, f"-Wl,-soname,{SONAME}", "-o", str(fresh)]
    command += [str(source) for source in sorted(SOURCES.glob("*.c"))]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        fresh.unlink(missing_ok=True)
        raise BuildError(f"{' '.join(command)}\nexit status {result.returncode}\n{result.stderr}")
    fresh.replace(target)
    stamp.write_text(digest)
    return target


def _digest() -> str:
    found = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        content = source.read_bytes()
        found.update(f"\n{source.name} {len(content)}\n".encode() + content)
    return found.hexdigest()
