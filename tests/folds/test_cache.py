"""The cache on disk keeps what it is given, and leaves alone whatever it did not write itself."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from monoidreduce.folds.cuda import cache
from monoidreduce.folds.cuda.cache import Image

IMAGE = Image(b"\x7fELF and\nmore", ("first", "second"), "log")
A, B, C, D = map(cache.key, "abcd")
OLD = 1e9  # seconds since 1970


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that the user names, with files of the user's, older than all others."""
    folder = tmp_path / "named"
    (folder / "thesis" / "deep").mkdir(parents=True, mode=0o700)
    for place in ("notes", A, "thesis/chapter", f"thesis/{A}", "thesis/deep/data"):
        (folder / place).write_bytes(b"of the user")
        os.utime(folder / place, (OLD - 9, OLD - 9))
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for one image."""
    monkeypatch.setattr(cache, "_MOST_BYTES", 150)


def content(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def place(named: Path) -> Path:
    """The cache's own folder."""
    return named / "monoidreduce-kernels"


def kept(named: Path) -> set[str]:
    """The keys of all that the cache holds; anything beside it and the marker is an error."""
    names = {file.name for file in place(named).iterdir()} - {"CACHEDIR.TAG"}
    assert all(name.endswith(".kept") for name in names)
    return {name[:-5] for name in names}


def test_store_and_load(named: Path) -> None:
    assert cache.load(A) is None
    cache.store(A, IMAGE)
    cache.store_fact(B, {"held": [True]})
    assert (cache.load(A), cache.load_fact(B)) == (IMAGE, {"held": [True]})
    assert cache.load(cache.key("text", "s")) is None and cache.key("text", "s") != cache.key("texts", "")
    assert cache.load(B) is None  # a fact is no image


def test_oldest_files_make_room(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, key in enumerate((C, B, A)):
        cache.store(key, IMAGE)
        os.utime(place(named) / f"{key}.kept", (OLD - age, OLD - age))
    size = (place(named) / f"{A}.kept").stat().st_size
    monkeypatch.setattr(cache, "_MOST_BYTES", 2 * size)
    assert cache.load(A) == IMAGE  # used now
    cache.store(D, IMAGE)
    assert kept(named) == {A, D}


def test_files_of_the_user_are_not_touched(named: Path, full: None) -> None:
    """Neither in the named folder and below, nor in the cache's own, whatever they are called."""
    before = content(named)
    cache.store(A, IMAGE)
    own = place(named)
    (own / "inner").mkdir()
    strange = ("notes", A, f"{A}.kept.bak", f"{A.upper()}.kept", "x.tmp", f"inner/{B}.kept")
    for name in strange:
        (own / name).write_bytes(b"of the user, and more than the cache may hold" * 9)
        os.utime(own / name, (OLD, OLD))
    before |= {f"monoidreduce-kernels/{name}": (own / name).read_bytes() for name in strange}
    for key in (B, C):
        cache.store(key, IMAGE)
    after = content(named)
    assert {name: after.get(name) for name in before} == before
    assert cache.load(C) == IMAGE and cache.load(A) is None  # those files take no room


@pytest.mark.parametrize(
    "marker", (None, b"Signature: 8a477f597d28d172789f06886806bc55\n# Of another program.\n")
)
def test_a_folder_of_that_name_that_is_not_the_caches(named: Path, full: None, marker: bytes | None) -> None:
    place(named).mkdir(mode=0o700)
    (place(named) / f"{A}.kept").write_bytes(b"of the user")
    if marker is not None:
        (place(named) / "CACHEDIR.TAG").write_bytes(marker)
    before = content(named)
    cache.store(A, IMAGE)
    cache.store(B, IMAGE)
    assert cache.load(B) is None and content(named) == before


def test_links_are_not_followed(named: Path, tmp_path: Path, full: None) -> None:
    """Those in the cache, out of it: to a folder, and to files under names of the cache's."""
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    cache.store(A, IMAGE)
    (place(named) / f"{A}.kept").rename(outside / f"{A}.kept")  # it would load
    (place(named) / f"{A}.kept").symlink_to(outside / f"{A}.kept")
    (place(named) / "ab").symlink_to(outside)
    before = content(outside)
    assert cache.load(A) is None
    for key in (A, B, C):
        cache.store(key, IMAGE)
    assert content(outside) == before and cache.load(A) is None
    assert (place(named) / f"{A}.kept").is_symlink() and (place(named) / "ab").is_symlink()
    marker = place(named) / "CACHEDIR.TAG"
    marker.rename(outside / "CACHEDIR.TAG")
    marker.symlink_to(outside / "CACHEDIR.TAG")
    assert cache.load(C) is None


def test_the_caches_own_folder_is_no_link(named: Path, tmp_path: Path) -> None:
    cache.store(A, IMAGE)
    place(named).rename(tmp_path / "elsewhere")
    place(named).symlink_to(tmp_path / "elsewhere")
    before = content(tmp_path / "elsewhere")
    cache.store(B, IMAGE)
    assert cache.load(A) is None and content(tmp_path / "elsewhere") == before


def test_the_named_folder_may_be_a_link(named: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user names the place: a cache is often moved to a larger disk so."""
    (tmp_path / "link").symlink_to(named)
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "link"))
    cache.store(A, IMAGE)
    assert cache.load(A) == IMAGE and kept(named) == {A}


@pytest.mark.parametrize("step", ("open", "write", "rename"))
def test_a_full_disk_leaves_nothing(named: Path, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    cache.store(A, IMAGE)

    def full(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        if step == "open":
            opened = os.open
            patched.setattr(os, "open", lambda *a, **o: full() if a[1] & os.O_CREAT else opened(*a, **o))
        elif step == "write":
            patched.setattr(cache, "_file", lambda *a: Full(*a) if a[2] & os.O_CREAT else FILE(*a))
        else:
            patched.setattr(os, "replace", full)
        cache.store(B, IMAGE)
    assert kept(named) == {A} and cache.load(B) is None
    cache.store(B, IMAGE)
    assert cache.load(B) == IMAGE


FILE = cache._file


class Full:
    """A file on a disk that is full before its last bytes are written."""

    def __init__(self, *arguments: Any) -> None:
        self.file = FILE(*arguments)

    def __enter__(self) -> Full:
        return self

    def write(self, content: bytes) -> int:
        return self.file.write(content[:-1])

    def __exit__(self, *_: object) -> None:
        self.file.close()
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_a_killed_process_left_goes(named: Path) -> None:
    """Once no process can be at it still; it does not stand in the way before."""
    place(named).mkdir(mode=0o700)
    at_work, left = (place(named) / f"{digit * 32}.tmp" for digit in "12")
    for file in (at_work, left):
        file.write_bytes(b"part")
    two_hours_ago = time.time() - 7200
    os.utime(left, (two_hours_ago, two_hours_ago))
    cache.store(A, IMAGE)
    assert cache.load(A) == IMAGE and at_work.exists() and not left.exists()


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_read(named: Path) -> None:
    cache.store(A, IMAGE)
    place(named).chmod(0o500)
    try:
        cache.store(B, IMAGE)
        assert cache.load(A) == IMAGE and kept(named) == {A}
    finally:
        place(named).chmod(0o700)


@pytest.mark.parametrize("mode", (0o770, 0o705, 0o701))
def test_what_others_may_open_is_not_read(named: Path, mode: int) -> None:
    """And its mode is the user's affair."""
    cache.store(A, IMAGE)
    place(named).chmod(mode)
    cache.store(B, IMAGE)
    assert cache.load(A) is None
    assert stat.S_IMODE(place(named).stat().st_mode) == mode and kept(named) == {A}


def test_modes(named: Path) -> None:
    """Whatever the umask; that of the user's folder stays, which others may read."""
    named.chmod(0o755)
    before = os.umask(0)
    try:
        cache.store(A, IMAGE)
    finally:
        os.umask(before)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in (named, *named.glob("monoid*/*"))}
    assert modes == {"named": 0o755, "CACHEDIR.TAG": 0o600, f"{A}.kept": 0o600}
    assert stat.S_IMODE(place(named).stat().st_mode) == 0o700


@pytest.mark.parametrize("where", ("off", "/proc/nothing", "file", "~nobody-of-this-name/cache"))
def test_no_folder(named: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    (named / "file").write_text("of the user")
    monkeypatch.chdir(named)
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", where)
    before = content(named)
    cache.store(A, IMAGE)
    assert cache.load(A) is None and content(named) == before


def test_a_home_that_no_shell_wrote_out(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(named))
    for where in ("~/cache", ""):
        monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", where)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        cache.store(A, IMAGE)
    assert kept(named / "cache") == kept(named / ".cache" / "monoidreduce") == {A}


def test_processes_may_store_the_same_at_once(named: Path) -> None:
    """Into a folder that none of them made, while what they store is removed again."""
    script = (
        "from monoidreduce.folds.cuda import cache\n"
        "from monoidreduce.folds.cuda.cache import Image\n"
        "cache._MOST_BYTES = 150_000\n"
        "for n in range(50):\n"
        "    key = cache.key(str(n % 3))\n"
        "    cache.store(key, Image(b'x' * 100_000, ('k',), ''))\n"
        "    found = cache.load(key)\n"
        "    assert found is None or found.code == b'x' * 100_000\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert len(kept(named)) == 1
