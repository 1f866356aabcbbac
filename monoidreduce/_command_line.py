"""What the commands share: arguments checked before any work, refusals of one line, files written whole."""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import shutil
import signal
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from monoidreduce import _C, _interrupt
from monoidreduce.functional import logsumexp_matmul

# What matplotlib draws to a file without further programs.
PLOT_FORMATS = (".eps", ".jpeg", ".jpg", ".pdf", ".png", ".ps", ".svg", ".svgz", ".tif", ".tiff", ".webp")
CUDA_TIERS = tuple(name for name, family in _C.FAMILIES.items() if not family.planes)

# Up to the next table, `name` is that of the project.
OWN_PYPROJECT = re.compile(r"^\[project\]\n(?:(?!\[).*\n)*?name = \"monoidreduce\"$", re.MULTILINE)


class Parser(argparse.ArgumentParser):
    """A parser that refuses with one line and exit status 2. "-1e6" is a number, and no option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._negative_number_matcher = re.compile(r"-\.?\d")  # argparse's own leaves out exponents

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {' '.join(message.splitlines())}\n")


def exit_with(main: Callable[[list[str]], int], argv: list[str]) -> NoReturn:
    """Runs a command and ends the process with the status that it returns.

    Ctrl-C leaves one line and status 130; a file that cannot be read or written leaves one line and status 1.
    A reader of the output that stops early, as `head` does, ends the command silently.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    if isinstance(sys.stdout, io.TextIOWrapper):  # the results are not lost for a name that it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
    status: object
    try:
        try:
            status = main(argv)
        except SystemExit as stop:
            status = stop.code
        print(end="", flush=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, _interrupt.leave)  # a second one
        with suppress(OSError):
            print(end="", flush=True)
        _interrupt.leave()
    except OSError as error:
        status = 1
        print(f"error: {error}", file=sys.stderr)
        with suppress(OSError):  # what could not be printed is not tried again
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the end takes a moment, and would be a traceback
    sys.exit(status)


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of an argument from `least` to `most`."""

    def convert(text: str) -> int:
        with suppress(ValueError):
            if least <= (value := int(text)) <= most:
                return value
        raise argparse.ArgumentTypeError(f"{text!r}, expected a whole number from {least} to {most}")

    return convert


def positive_number(text: str) -> float:
    """The type of an argument that is finite and above 0."""
    with suppress(ValueError):
        if 0 < (value := float(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text!r}, expected a number above 0")


def some_path(text: str) -> Path:
    """The type of an argument that names a file or a folder."""
    if not text:  # Path("") is the working directory
        raise argparse.ArgumentTypeError("'', expected a file or a folder")
    return Path(text)


def plot_file(text: str) -> Path:
    """The type of an argument that names a plot to write; the file may exist."""
    path = Path(text)
    if path.suffix.lower() not in PLOT_FORMATS:
        raise argparse.ArgumentTypeError(f"{text!r}, expected a name that ends in {', '.join(PLOT_FORMATS)}")
    try:
        check_writable(path)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r}, cannot be written: {error.strerror}") from error
    return path


def check_writable(path: Path) -> None:
    """Raises OSError unless `replacing(path)` can write a file, new or in the place of one."""
    target = _followed(path)
    with suppress(FileNotFoundError):
        if not stat.S_ISREG(target.stat().st_mode):
            raise OSError(0, "not a file")
        target.open("r+b").close()
    check_writable_folder(target.parent)


def check_writable_folder(folder: Path) -> None:
    """Raises OSError unless `folder` exists and a file can be made there."""
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, which takes its place and mode once it is whole, or is removed."""
    target = _followed(path)
    beside = target.with_name(f".{uuid.uuid4().hex}.tmp")
    try:
        yield beside
        with suppress(FileNotFoundError):  # a new file
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _followed(path: Path) -> Path:
    """`path`, or what it links to: the link stays. Raises OSError in a working directory that is gone."""
    return Path(os.path.realpath(path))


def is_clone(folder: Path) -> bool:
    """Whether `folder` is a clone of this project, and not another's that has a bench/run.py too."""
    try:
        about = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return OWN_PYPROJECT.search(about) is not None and (folder / "bench" / "run.py").is_file()


def find_clone() -> Path | None:
    """The working directory, or where the package is, if it is a clone."""
    return next(filter(is_clone, (_followed(Path(".")), Path(__file__).resolve().parents[1])), None)


def check_environment(parser: argparse.ArgumentParser) -> None:
    """Refuses an environment variable of the library that names nothing."""
    tier = os.environ.get("MONOIDREDUCE_CUDA_TIER", "")
    if tier not in ("", *CUDA_TIERS):
        parser.error(f"MONOIDREDUCE_CUDA_TIER: expected one of {', '.join(CUDA_TIERS)}, got {tier}")
    try:
        _C.cpu_isa()
    except ValueError as error:
        parser.error(str(error))


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds --device, which `device_of` reads."""
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where it can be used")


def device_of(parser: argparse.ArgumentParser, named: str | None) -> torch.device:
    """The device that --device names, or a default; refuses one on which the operators do not run."""
    has_cuda = torch.cuda.is_available() and _C.build_info()["cuda"]
    device = torch.device(named or ("cuda" if has_cuda else "cpu"))
    try:
        one = torch.ones(1, 1, device=device)
        logsumexp_matmul(one, one).item()
    except (
        AssertionError,
        RuntimeError,
    ) as error:  # the former is what torch raises if it is built without CUDA
        parser.error(f"argument --device: {device}: {str(error).splitlines()[0]}")
    return device
