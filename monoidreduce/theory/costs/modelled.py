"""Dry runs of the calls that the cost model covers."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from monoidreduce import _C, functional
from monoidreduce._ops.dry_run import DryRun, dry_run
from monoidreduce._validate import check_choice, mismatch
from monoidreduce.inspection import MODS
from monoidreduce.theory.costs.sizes import SIZES

__all__ = ["MOST", "modelled_run"]

MOST = 1 << 24  # largest axis of a tensor; with such an axis the model takes seconds


def modelled_run(
    operator: str,
    call: dict[str, Any],
    needed: tuple[str, ...],
    gpu: _C.DeviceFacts | None,
    keeps: bool = True,
) -> DryRun:
    """`dry_run` of an operator of `monoidreduce.functional`; the other arguments are as there.

    Raises:
        TypeError, ValueError: the call itself would raise, or the cost model does not cover it; see
            docs/cost.md, "What it does not know".
    """
    _check_modelled(operator, call)
    run = dry_run(getattr(functional, operator), call, needed, gpu, keeps=keeps)
    if any(launch.name == "statistics_fold" for launch in run.launches):
        widths = [call["q"].shape[3], call["v"].shape[3]]
        raise ValueError(
            mismatch("q, v", "heads at most 256 wide: the folds of others have no model", widths)
        )
    return run


def _check_modelled(operator: str, call: dict[str, Any]) -> None:
    """Raise ValueError for a call that the cost model does not cover."""
    check_choice("op", operator, tuple(SIZES))
    for name, value in call.items():
        if isinstance(value, Tensor) and max(value.shape, default=0) > MOST:
            expected = f"at most {MOST} along each axis, whose tiles the model goes through"
            raise ValueError(mismatch(name, expected, [*value.shape]))
    for name in MODS:
        if call.get(name) is not None:
            raise ValueError(mismatch(name, "None: kernels of modified scores have no model", call[name]))
    if call.get("dropout_p"):
        raise ValueError(mismatch("dropout_p", "0: kernels with dropout have no model", call["dropout_p"]))
    mixture = ("loss", "bias", "teacher_bias", "target", "hard_weight")
    if operator == "linear_distillation" and functional.distils_by_statistics(*(call[n] for n in mixture)):
        raise ValueError(mismatch("loss", "none by statistics: jsd, biases or a target", repr(call["loss"])))
