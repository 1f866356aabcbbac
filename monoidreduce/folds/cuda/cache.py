"""Disk cache of compiled kernels and related facts. A file is named by the hash of everything it was made
from.

The environment variable MONOIDREDUCE_CACHE_DIR names a folder, which may also hold other things; `off`
disables the cache. Files are in a subfolder of their own, `monoidreduce-kernels`, which has a marker file.
Nothing outside of it, no file with another kind of name and no symbolic link is ever read, counted, replaced
or removed. All files are opened relative to a descriptor of that folder, so a link that replaces the folder
later is not followed either.

A file is written under a temporary name and renamed, so several processes may write the same file at once.
Since the cache holds machine code that is executed, only a folder owned by the user and closed to others is
read.
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
# A standard marker, by which backup programs leave out the folder: https://bford.info/cachedir
_MARKER = "CACHEDIR.TAG"
_MARK = b"Signature: 8a477f597d28d172789f06886806bc55\n# Kernels of monoidreduce, which may be deleted.\n"
_KEPT = re.compile(r"[0-9a-f]{64}\.kept")
_UNFINISHED = re.compile(r"[0-9a-f]{32}\.tmp")
_MOST_BYTES = 256 << 20
_ABANDONED = 3600  # seconds after which an unfinished file is removed: its writer must have died


class Image(NamedTuple):
    """A compiled module (CUBIN or PTX), with the names of the kernels in it."""

    code: bytes
    names: tuple[str, ...]
    log: str  # the compiler's log


def folder() -> Path | None:
    """The folder of the cache; None if the cache is disabled or there is no home folder."""
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
    """A hash of several texts; how they are split matters."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def load(key: str) -> Image | None:
    """The image that was stored under the key; None if there is none or it is damaged."""
    try:
        head, _, code = _read(key).partition(b"\n")
        facts = json.loads(head)
        if facts["sha256"] != hashlib.sha256(code).hexdigest():
            return None
        return Image(code, tuple(facts["names"]), facts["log"])
    except (ValueError, KeyError, TypeError):
        return None


def store(key: str, image: Image) -> None:
    """Store an image, if the folder can be written."""
    facts = {"sha256": hashlib.sha256(image.code).hexdigest(), "names": image.names, "log": image.log}
    _write(key, json.dumps(facts).encode() + b"\n" + image.code)


def load_fact(key: str) -> Any:
    """The JSON value that was stored under the key; None if there is none."""
    try:
        return json.loads(_read(key))
    except ValueError:
        return None


def store_fact(key: str, fact: Any) -> None:
    """Store a JSON-compatible value, if the folder can be written."""
    _write(key, json.dumps(fact).encode())


def _read(key: str) -> bytes:
    """The content of a file; empty if there is none."""
    try:
        with _opened() as at, _file(at, _kept(key), os.O_RDONLY, "rb") as file:
            content: bytes = file.read()
            with contextlib.suppress(OSError):  # the disk may be read-only
                os.utime(file.fileno())  # marks it as used: the least recently used are removed first
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
    """A descriptor of the cache's folder.

    Raises OSError unless the folder has the marker, belongs to the user, and is closed to others. make:
    create it.
    """
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
        # A process may have died before it wrote the marker.
        if make and all(map(_UNFINISHED.fullmatch, os.listdir(at))):
            _put(at, _MARKER, _MARK)
        with _file(at, _MARKER, os.O_RDONLY, "rb") as marker:
            if marker.read() != _MARK:
                raise FileNotFoundError
        yield at
    finally:
        os.close(at)


def _file(at: int, name: str, flags: int, mode: str) -> IO[bytes]:
    """Open a file of the folder, with user-only permissions, without following links or blocking on pipes."""
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    return open(name, mode, opener=lambda path, _: os.open(path, flags, 0o600, dir_fd=at))


def _is_free(at: int, name: str) -> bool:
    """Whether the cache may write this name: it does not exist, or is a regular file."""
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=at, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return True


def _put(at: int, name: str, content: bytes) -> None:
    """Write a file of the folder atomically. If that fails, as on a full disk, nothing of it is left."""
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
    """Remove the least recently used files beyond the size limit, and abandoned unfinished files."""
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
