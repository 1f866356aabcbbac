"""Compiled kernels and facts about them on disk: files named after the hash of all that they are made from.

The environment variable MONOIDREDUCE_CACHE_DIR names a folder, which may hold anything else; `off` keeps
nothing. Files are in a folder of the cache's own there, `monoidreduce-kernels`, which a marker tells from
another's. Nothing outside of it, no file with another kind of name and no symbolic link is read, counted,
replaced or removed. All is opened relative to a descriptor of that folder, so a link that takes its place
later is not followed either.

A file is written under another name and renamed, so processes may write the same one at once. Machine code is
run, so only a folder of the user's own, closed to others, is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

__all__ = ["FOLDER", "Image", "folder", "key", "load", "load_fact", "store", "store_fact"]

FOLDER = "monoidreduce-kernels"
# Programs that back up files know this one, and leave out the folder: https://bford.info/cachedir
_MARKER = "CACHEDIR.TAG"
_MARK = b"Signature: 8a477f597d28d172789f06886806bc55\n# Kernels of monoidreduce, which may be deleted.\n"
_KEPT = re.compile(r"[0-9a-f]{64}\.kept")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.tmp")
_MOST_BYTES = 256 << 20
_ABANDONED = 3600  # seconds: no process takes so long to write a file, so the one that began it has ended


class Image(NamedTuple):
    """What a driver loads, and the names of the kernels in it."""

    code: bytes
    names: tuple[str, ...]
    log: str  # of the compiler


def folder() -> Path | None:
    """Where files of the cache are, if it may keep any."""
    named = os.environ.get("MONOIDREDUCE_CACHE_DIR", "")
    if named == "off":
        return None
    try:
        if named:
            return Path(named).expanduser() / FOLDER
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "monoidreduce" / FOLDER
    except RuntimeError:  # no home
        return None


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
    try:
        with _opened() as at, _file(at, _kept(key), os.O_RDONLY, "rb") as file:
            content: bytes = file.read()
            with contextlib.suppress(OSError):  # of a disk that cannot be written
                os.utime(file.fileno())  # used now: the oldest go first
            return content
    except OSError:
        return b""


def _write(key: str, content: bytes) -> None:
    with contextlib.suppress(OSError), _opened(make=True) as at:
        if _is_free(at, _kept(key)):
            _put(at, _kept(key), content)
            _make_room(at)


def _kept(key: str) -> str:
    return f"{key}.kept"


@contextlib.contextmanager
def _opened(make: bool = False) -> Iterator[int]:
    """A descriptor of the cache's folder. Raises OSError unless it is its own, and closed to others."""
    path = folder()
    if path is None:
        raise FileNotFoundError
    if make:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    at = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        facts = os.fstat(at)
        if stat.S_IMODE(facts.st_mode) & 0o077 or facts.st_uid != os.getuid():
            raise PermissionError
        # A process may have ended before it wrote the marker.
        if make and all(map(_UNFINISHED.fullmatch, os.listdir(at))):
            _put(at, _MARKER, _MARK)
        with _file(at, _MARKER, os.O_RDONLY, "rb") as marker:
            if marker.read() != _MARK:
                raise FileNotFoundError
        yield at
    finally:
        os.close(at)


def _file(at: int, name: str, flags: int, mode: str) -> IO[bytes]:
    """A file of the folder, which the user alone may read; no link is followed, nor is a pipe waited for."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(name, mode, opener=lambda path, _: os.open(path, flags, 0o600, dir_fd=at))


def _is_free(at: int, name: str) -> bool:
    """Can the cache take the name: nothing has it, or a file, and no link or folder."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def _put(at: int, name: str, content: bytes) -> None:
    """Write a file of the folder whole. Where it cannot be, as on a full disk, nothing is left of it."""
    unfinished = f"{uuid.uuid4().hex}.tmp"
    try:
        with _file(at, unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, "wb") as file:
            file.write(content)
        os.replace(unfinished, name, src_dir_fd=at, dst_dir_fd=at)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished, dir_fd=at)
        raise


def _make_room(at: int) -> None:
    """Remove the files that were used longest ago, beyond the most bytes, and what was never finished."""
    kept = []
    with os.scandir(at) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process removed it
                if not entry.is_file(follow_symlinks=False):
                    continue
                facts = entry.stat(follow_symlinks=False)
                if _KEPT.fullmatch(entry.name):
                    kept.append((facts.st_mtime, facts.st_size, entry.name))
                elif _UNFINISHED.fullmatch(entry.name) and time.time() - facts.st_mtime > _ABANDONED:
                    os.unlink(entry.name, dir_fd=at)
    bytes = 0
    for _, size, name in sorted(kept, reverse=True):
        bytes += size
        if bytes > _MOST_BYTES:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=at)
