"""Integer functions with values near or beyond 32 bits, to compare engines with torch's int64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CASES", "captured", "kept"]

LEAST = -(2**63)


def captured(rows: int, columns: int, device: torch.device | None = None) -> dict[str, Tensor]:
    """Captured integer and bool tensors of all dtypes, indexed by rows and columns."""
    n = max(rows, columns)
    at = torch.arange(n)
    tensors = {
        "doc": at // 4 + 2**33,
        "doc32": (at // 4).int(),
        "time": 1_700_000_000_000 + at * 1000,
        "big": torch.tensor([LEAST, LEAST + 1, -(2**32), -1, 0, 1, 2**31 - 1, 2**31, 2**63 - 1])[at % 9],
        "edge": torch.tensor([-(2**31), 2**31 - 1, -(2**31) - 1, 2**31, 0, 5])[at % 6],
        "edge32": torch.tensor([-(2**31), 2**31 - 1, -1, 0, 3], dtype=torch.int32)[at % 5],
        "u32": torch.tensor([0, 2**31, 2**32 - 1, 7])[at % 4].to(torch.uint32),
        "u16": torch.tensor([0, 2**16 - 1, 300])[at % 3].to(torch.uint16),
        "i8": torch.tensor([-128, 127, 3], dtype=torch.int8)[at % 3],
        "u8": torch.tensor([255, 2, 17], dtype=torch.uint8)[at % 3],
        "flag": at % 3 == 1,
        "table": torch.arange(7) * 2**34 - 2**35,
        "powers": 2 ** torch.arange(32),
    }
    return {name: t.to(device) for name, t in tensors.items()}


# Mask functions of a query i, a key j and the tensors t of `captured`. True keeps the key. They take
# expressions as well as int64 tensors, so that torch gives the expected mask.
CASES: dict[str, Callable[..., Any]] = {
    "documents": lambda i, j, t: t["doc"][i] == t["doc"][j],
    "times": lambda i, j, t: t["time"][i] - t["time"][j] >= 3000,
    "hash": lambda i, j, t: (i * 7919999 + j * 1047291) % 1000 >= 100,
    "product": lambda i, j, t: (i * 1000003 + j) % 3 != 0,
    "wraps": lambda i, j, t: (i + 1) * 2**61 * (j + 1) - 5 > i,
    "wraps to the other end": lambda i, j, t: t["big"][i] - 1 > t["big"][j],
    "negated": lambda i, j, t: -t["big"][i] <= abs(t["big"][j]),
    "power": lambda i, j, t: (t["big"][i] - j) ** 3 > 0,
    "remainders": lambda i, j, t: (t["big"][i] % (3 * j - 11) + t["big"][j] % 7 - (i - 9) % -5) % 2 == 0,
    "quotients": lambda i, j, t: (t["big"][i] // (3 * j - 11) + (i - 7) // 3 + t["doc"][j] // -9) % 3 != 1,
    "divided by -1": lambda i, j, t: t["edge32"][i] // (j % 1 - 1) > t["edge32"][j],
    "edges": lambda i, j, t: (
        (t["edge"][i] < t["edge"][j]) ^ (t["edge"][j] == 2**31 - 1) ^ (i >= t["edge"][i])
    ),
    "edges of 32": lambda i, j, t: t["edge32"][i] - t["edge32"][j] > 2**31 - 5,
    "sum of 32": lambda i, j, t: t["edge32"][i] + t["edge32"][j] + i > -2,
    "unsigned": lambda i, j, t: t["u32"][i] * t["u32"][j] + t["u16"][i] * t["u16"][j] > 2**62,
    "bytes": lambda i, j, t: (t["i8"][i] * t["u8"][j] - t["i8"][j] * 2**24 * 300) % 11 < 5,
    "flags": lambda i, j, t: t["flag"][i] + 2**40 * t["flag"][j] - 2**40 >= i - j,
    "where": lambda i, j, t: torch.where(t["flag"][i], t["big"][j], j) > torch.where(t["flag"][j], i, 2**40),
    "least": lambda i, j, t: torch.minimum(t["big"][i], t["edge"][j]) < torch.maximum(t["big"][j], i),
    "clamped": lambda i, j, t: torch.clamp(t["big"][i], -(2**40), 2**40) < torch.clamp(t["edge"][j], 0, 4),
    "table": lambda i, j, t: t["table"][(t["doc"][i] + j) % 7] > t["table"][j % 5],
    "constants": lambda i, j, t: (i * LEAST == 0) ^ (j + (2**63 - 1) < 0),
    "converted": lambda i, j, t: t["time"][i].int().long() % 5 > t["edge"][j].to(torch.int16).long(),
    "bits": lambda i, j, t: ((i & 6) ^ (j | 9)) >> 1 != (~j & i) % 4,
    "bits of 32": lambda i, j, t: (t["edge32"][i] & t["i8"][j]) < (t["edge32"][j] | -(i << 3)),
    "bits of 64": lambda i, j, t: (t["big"][i] ^ t["time"][j]) > (t["big"][j] & ~t["edge"][i]) | j,
    "shifts of 64": lambda i, j, t: (t["time"][i] << 30) ^ (t["big"][j] >> 7) > t["u32"][i] << 31,
    "bits of a mask": lambda i, j, t: (t["u32"][i] // t["powers"][j % 32]) & 1 == 1,
    "functions of bits": lambda i, j, t: (
        torch.logical_and(torch.bitwise_and(i, 3), torch.bitwise_right_shift(j, 1))
        ^ (torch.bitwise_left_shift(i, 2) > torch.bitwise_not(j) + torch.bitwise_xor(j, 77))
        | torch.logical_not(torch.bitwise_or(i % 5, 0))
    ),
    "window": lambda i, j, t: (i - j < 5) & (j - i < 7) & (t["doc32"][i] == t["doc32"][j]),
}


def kept(name: str, rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """The mask of a case, [rows, columns], by torch in int64."""
    t = {name: of if of.dtype == torch.bool else of.long() for name, of in captured(rows, columns).items()}
    t = {name: of.to(device) for name, of in t.items()}
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    found: Tensor = CASES[name](i, j, t)
    return found.expand(rows, columns)
