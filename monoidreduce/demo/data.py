"""Real text for the demo: the Python standard library's own source, or any file or folder."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


def _files(path: Path | None) -> list[Path]:
    if path is None:
        library = Path(sysconfig.get_path("stdlib"))
        return [
            file
            for file in sorted(library.rglob("*.py"))
            if not _NOT_LIBRARY & set(file.relative_to(library).parts)
        ]
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if file.is_file()]
    if path.is_file():
        return [path]
    raise ValueError(f"path: no file or folder at {str(path)!r}")


def read_text(path: Path | None) -> Tensor:
    """The bytes of all text files at `path` (None: the standard library's source) as a uint8 tensor [bytes].

    A file that holds a zero byte is taken for binary and skipped. Raises ValueError where there is no text.
    """
    parts = [data for data in (file.read_bytes() for file in _files(path)) if data and b"\0" not in data]
    if not parts:
        raise ValueError(f"path: no text found at {str(path or sysconfig.get_path('stdlib'))!r}")
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def check_length(text: Tensor, length: int) -> None:
    """Raises ValueError where the text has no sequence of `length` bytes and a next one."""
    if text.numel() <= length:
        raise ValueError(f"text: {text.numel()} bytes, expected more than one sequence of {length}")


def batches(text: Tensor, steps: int, batch: int, length: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """`steps` pairs (tokens, next tokens), int64 [batch, length]; the seed alone decides their places."""
    check_length(text, length)
    generator = torch.Generator().manual_seed(seed)
    windows = text.unfold(0, length + 1, 1)  # [places, length + 1], a view
    for _ in range(steps):
        window = windows[torch.randint(len(windows), (batch,), generator=generator)].long()
        yield window[:, :-1], window[:, 1:]
