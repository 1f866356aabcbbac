"""Dry runs: what they note is what the ops do, and no other thread sees them."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce._ops import engine
from monoidreduce._ops.dry_run import DryRun
from monoidreduce.hardware import find
from monoidreduce.inspection import resolved
from monoidreduce.theory.costs.modelled import modelled_run

H100 = find("h100").facts()


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def run(op: str, *tensors: Tensor, needed: tuple[str, ...] = (), **options: Any) -> DryRun:
    return modelled_run(*resolved(op, tensors, options), needed, H100)


def names(found: DryRun, backward: bool) -> list[str]:
    return [x.name for x in found.launches if x.backward == backward and not x.name.startswith("aten::")]


def test_folds_of_statistics_have_no_model() -> None:
    with pytest.raises(
        ValueError, match=r"^loss: expected none by statistics: jsd, biases or a target, got 'jsd'"
    ):
        run("linear_distillation", *(meta(64, 32),) * 4, loss="jsd")


def test_products_into_float32_are_not_asked_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.11 multiplies tensors without memory by the dtype of the result."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("torch was asked")

    monkeypatch.setattr(torch.ops.aten.addmm.dtype_out, "_op", fail)
    found = run("mlp", meta(300, 512), meta(1024, 512), meta(512, 1024), needed=("x", "w1", "w2"))
    assert "aten::addmm" in [launch.name for launch in found.launches]


def test_a_forward_pass_alone() -> None:
    q = meta(2, 4, 512, 64)
    found = run("attention", q, q, q)
    assert names(found, False) == ["attention_forward"] and names(found, True) == []
    (launch,) = found.launches
    assert launch.plan is not None and launch.plan.tier == "sm90"
    assert launch.arguments["q"].shape == q.shape and "bias" not in launch.arguments


def test_the_peak_of_attention() -> None:
    """Two numbers a row, the plan's scratch, and sums of d_q in float32."""
    q = meta(2, 4, 512, 64)
    found = run("attention", q, q, q, needed=("q", "k", "v"))
    backward = next(launch for launch in found.launches if launch.name == "attention_backward")
    rows = 2 * 4 * 512
    scratch = backward.arguments["scratch"].bytes
    assert scratch == 4 * backward.plan.scratch
    assert found.peak == pytest.approx(2 * 4 * rows + scratch + 4 * rows * 64, abs=512)


def test_the_slices_of_cross_entropy_are_those_of_its_workspace() -> None:
    x, weight, target = meta(1024, 256), meta(32000, 256), meta(1024, dtype=torch.int64)
    call = {"needed": ("x", "weight")}
    whole = run("linear_cross_entropy", x, weight, target, workspace=1 << 40, **call)
    assert "cross_entropy_local_gradient" not in names(whole, True)  # all are kept
    assert whole.peak >= 2 * 1024 * 32000
    sliced = run("linear_cross_entropy", x, weight, target, workspace=4 << 20, **call)
    slices = [x for x in sliced.launches if x.name == "cross_entropy_local_gradient"]
    kept = next(x for x in sliced.launches if x.name == "cross_entropy_forward").arguments.get("kept")
    first = 0 if kept is None else kept.shape[1]
    assert len(slices) > 1
    assert sum(part.arguments["weight"].shape[0] for part in slices) == 32000 - first


@pytest.mark.parametrize("rows", (1, 256))
def test_few_rows_stay_where_they_are(rows: int) -> None:
    x, weight, target = meta(rows, 512), meta(2048, 512), meta(rows, dtype=torch.int64)
    found = run("linear_cross_entropy", x, weight, target, needed=("x", "weight"))
    assert names(found, False) == ["cross_entropy_forward"]
    assert "gathered" not in found.launches[0].arguments
    assert names(found, True) == ["clear_rows", "columns_product", "scale_rows"]  # torch multiplies for dX


def test_more_rows_are_ordered_and_copied_together() -> None:
    x, weight, target = meta(257, 512), meta(2048, 512), meta(257, dtype=torch.int64)
    found = run("linear_cross_entropy", x, weight, target, needed=("x", "weight"))
    assert names(found, False) == ["order_rows", "cross_entropy_forward"]
    assert names(found, True) == ["order_rows", "scale_rows", "columns_product", "scale_rows"]


def test_frozen_weights_have_no_product() -> None:
    x, weight, target = meta(1024, 4096), meta(32000, 4096), meta(1024, dtype=torch.int64)
    found = run("linear_cross_entropy", x, weight, target, needed=("x",))
    assert "rows_product" in names(found, True) and "columns_product" not in names(found, True)


def test_nothing_is_allocated() -> None:
    q = meta(64, 64, 1 << 16, 128)  # 64 GiB
    run("attention", q, q, q, needed=("q",))  # what is loaded once
    tracemalloc.start()
    run("attention", q, q, q, needed=("q",))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20
    assert not torch.cuda.is_initialized()


def test_other_threads_run_kernels_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}
    plan = _C.plan_attention_forward

    def look(*args: Any, **kwargs: Any) -> _C.Plan:
        assert engine._C.attention_forward is not _C.attention_forward
        thread = threading.Thread(
            target=lambda: seen.update(vars(engine._C), kernel=engine._C.attention_forward)
        )
        thread.start()
        thread.join()
        return plan(*args, **kwargs)

    monkeypatch.setattr(_C, "plan_attention_forward", look)
    q = meta(1, 1, 128, 64)
    run("attention", q, q, q)
    assert seen == {"kernel": _C.attention_forward}


def test_a_failed_run_leaves_the_engine_as_it_was() -> None:
    with pytest.raises(ValueError, match="k"):
        run("attention", meta(1, 1, 128, 64), meta(1, 1, 128, 32), meta(1, 1, 128, 64))
    assert vars(engine._C) == vars(engine.streams) == {}
    a = torch.randn(4, 8)
    torch.testing.assert_close(mr.logsumexp_matmul(a, a), (a @ a.T).logsumexp(1))
