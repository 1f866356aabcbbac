"""What `explain` returns, and the words for devices and dtypes in it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monoidreduce import _C

__all__ = ["Explanation", "architecture_of", "name_of"]


@dataclass(frozen=True)
class Explanation:
    """What a call of an operator would run; `str()` of it is for reading.

    Attributes:
        operator: its name.
        forward, backward: the kernel paths as `_C.path_counts()` names them.
        architecture: the instruction set of the CPU, or that of the GPU as "sm_90".
        tiles: the rows and columns that are computed at a time, forward and backward; None on a GPU.
        workspace: bytes for local gradients, None where the operator needs none.
        deterministic: whether two runs, forward and backward, give the same bits.
        reasons: why, a sentence each.
    """

    operator: str
    forward: str
    backward: str
    architecture: str
    tiles: tuple[tuple[int, int], tuple[int, int]] | None
    workspace: int | None
    deterministic: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        tiles = {}
        if self.tiles is not None:
            forward, backward = (f"{rows} x {columns}" for rows, columns in self.tiles)
            tiles["tiles"] = f"{forward} forward, {backward} backward (rows x columns)"
        facts = {
            "forward": self.forward,
            "backward": self.backward,
            "architecture": self.architecture,
            **tiles,
            "workspace": "none needed" if self.workspace is None else f"up to {self.workspace} bytes",
            "deterministic": "yes" if self.deterministic else "no",
        }
        lines = [self.operator]
        lines += [f"  {name:<14}{fact}" for name, fact in facts.items()]
        lines += [f"  - {reason}" for reason in self.reasons]
        return "\n".join(lines)


def architecture_of(device: torch.device) -> str:
    if device.type == "cpu":
        return _C.cpu_isa()
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
