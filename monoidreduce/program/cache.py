"""Compiled kernels and facts about them on disk: files named after the hash of all that they are made from.

The environment variable MONOIDREDUCE_CACHE_DIR names the folder; `off` keeps nothing. A file is written under
another name and renamed, so processes may write the same one at once. Machine code is run, so only a folder
of the user's own, closed to others, is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Image", "folder", "key", "load", "load_fact", "store", "store_fact"]

_MOST_BYTES = 256 << 20


class Image(NamedTuple):
    """What a driver loads, and the names of the kernels in it."""

    code: bytes
    names: tuple[str, ...]
    log: str  # of the compiler


def folder() -> Path | None:
    """Where kernels are, None for nowhere. It is there and closed to others."""
    named = os.environ.get("MONOIDREDUCE_CACHE_DIR", "")
    if named == "off":
        return None
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        path = Path(named) if named else Path(base) / "monoidreduce"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.stat()
    except (OSError, RuntimeError):  # RuntimeError: no home
        return None
    closed = stat.S_IMODE(facts.st_mode) & 0o077 == 0 and facts.st_uid == os.getuid()
    return path if closed else None


def key(*parts: str) -> str:
    """The hash of some texts, which are told apart."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(key: str) -> Image | None:
    """The kernels that were stored under the key, if all of them are there."""
    try:
        head, _, code = _read(key).partition(b"\n")
        facts = json.loads(head)
        if facts["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        return Image(code, tuple(facts["names"]), facts["log"])
    except (ValueError, KeyError, TypeError):
        return None


def store(key: str, image: Image) -> None:
    """Keep an image, as far as there is a folder that can be written."""
    facts = {"sha256": hashlib.sha256(image.code).hexdigest(), "names": image.names, "log": image.log}
    _write(key, json.dumps(facts).encode() + b"\n" + image.code)


def load_fact(key: str) -> Any:
    """What was stored under the key, as JSON has it; None where nothing is."""
    try:
        return json.loads(_read(key))
    except ValueError:
        return None


def store_fact(key: str, fact: Any) -> None:
    """Keep what JSON can write, as far as there is a folder that can be written."""
    _write(key, json.dumps(fact).encode())


def _read(key: str) -> bytes:
    """The content of a file, nothing where there is none."""
    path = folder()
    if path is None:
        return b""
    try:
        content = (path / key[:2] / key).read_bytes()
    except OSError:
        return b""
    with contextlib.suppress(OSError):
        os.utime(path / key[:2] / key)  # used now: the oldest go first
    return content


def _write(key: str, content: bytes) -> None:
    path = folder()
    if path is None:
        return
    try:
        place = path / key[:2]
        place.mkdir(mode=0o700, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place, prefix=".", delete=False) as file:
            file.write(content)
        os.replace(file.name, place / key)
        _make_room(path)
    except OSError:
        return


def _make_room(path: Path) -> None:
    """Remove the files that were used longest ago, beyond the most bytes."""
    folders = [entry.path for entry in os.scandir(path) if entry.is_dir()]
    files = [(entry.stat(), entry.path) for folder in folders for entry in os.scandir(folder)]
    bytes = 0
    for facts, file in sorted(files, key=lambda of: -of[0].st_mtime):
        bytes += facts.st_size
        if bytes > _MOST_BYTES:
            Path(file).unlink(missing_ok=True)
