"""What `explain` returns, and the words for devices and dtypes in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from monoidreduce import _C
from monoidreduce._ops.dry_run import DryRun, Launch

__all__ = ["Explanation", "Pass", "architecture_of", "name_of", "passes_of"]


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


# Kernels of a part of a pass, and the pass as which `_C` counts them.
_PARTS = {
    "mlp_hidden": "mlp_forward",
    "mlp_local_gradient": "mlp_backward",
    "gated_hidden": "mlp_forward",
    "gated_gradient": "mlp_backward",
    "cross_entropy_local_gradient": "cross_entropy_backward",
    "distillation_local_gradient": "distillation_backward",
    "log_probs_local_gradient": "log_probs_backward",
    "logsumexp_local_gradient": "logsumexp_backward",
}


class Pass(NamedTuple):
    """What a forward or a backward pass runs.

    Attributes:
        path: as `_C.path_counts()` names it. The family of kernels is "torch" where none of ours runs.
        plan: None on a CPU, and for kernels that any GPU runs alike.
        launch: of the kernel that gives the pass its name; None if there is nothing left for it to do.
        of_products: whether the pass multiplies stored dlogits, weights or hidden values.
    """

    path: str
    plan: _C.Plan | None
    launch: Launch | None
    of_products: bool


def passes_of(run: DryRun) -> tuple[Pass, Pass]:
    """The forward and the backward pass of a dry run."""
    forward, backward = (_pass_of(run, backward) for backward in (False, True))
    return forward, backward


def _pass_of(run: DryRun, backward: bool) -> Pass:
    endings = ("_backward", "_pull", "_gradient") if backward else ("_forward", "_fold")

    def names_pass(name: str, of_backward: bool) -> bool:
        return of_backward == backward and _PARTS.get(name, name).endswith(endings)

    launch = next((x for x in run.launches if names_pass(x.name, x.backward)), None)
    planned = next((x for x in run.plans if names_pass(x.name, x.backward)), None)
    op = run.ops[-1]
    leading = next(iter((op if launch is None else launch).arguments.values()))
    if launch is not None:
        name, plan = launch.name, launch.plan
    elif planned is not None:
        name, plan = planned.name, planned.plan
    else:
        name, plan = f"{op.name}_{'backward' if backward else 'forward'}", None
    on_gpu = next(iter(op.arguments.values())).is_cuda
    idle = launch is None and plan is None
    if idle:
        engine = f"{'cuda' if on_gpu else 'cpu'}/torch"
    elif not on_gpu:
        engine = f"cpu/{_C.cpu_isa_of(torch.empty(0, dtype=leading.dtype))}"
    else:
        engine = f"cuda/{'simt' if plan is None else plan.tier}"
        in_order = torch.are_deterministic_algorithms_enabled()
        engine += "/deterministic" if in_order and launch is not None and name.endswith("_backward") else ""
    path = f"{_PARTS.get(name, name)}/{engine}/{name_of(leading.dtype)}"
    writes_gradients = launch is not None and name.endswith(("_backward", "_pull"))
    return Pass(path, plan, launch, backward and not idle and not writes_gradients)
