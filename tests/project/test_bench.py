"""The benchmarks compare the same thing, and their arithmetic and tables are right. No time is asserted."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import math
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from inductor import leave_out_code
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2]))

from bench import (
    accuracy,
    attention,
    captured,
    cross_entropy,
    distillation,
    first_call,
    folds,
    harness,
    interpreter,
    kernel_sums,
    log_probs,
    memory,
    mlp,
    models,
    mods,
    overhead,
    payloads,
    plot,
    publish,
    report,
    run,
    user_losses,
)
from bench.decode import measure_decode
from bench.forward import HALF_IGNORED, PRODUCT, measure_forward
from bench.harness import (
    Case,
    Stopwatch,
    attempt,
    deterministic,
    differences,
    on_tier,
    run_once,
    summary,
    time_case,
)
from bench.machine import environment
from monoidreduce import reference

pytestmark = pytest.mark.release  # a test of tools

CPU = torch.device("cpu")
RESULTS = Path(run.__file__).resolve().parent / "results"


# attention_options and attention_wide are attention, captured has functions of scores, payloads and
# user_losses are folds, and short has cases of all.
CASES_OF_OTHERS = {"attention_options", "attention_wide", "captured", "payloads", "short", "user_losses"}


def quick_cases() -> list[Case]:
    return [
        case for op in run.OPERATORS for case in importlib.import_module(f"bench.{op}").cases(CPU, quick=True)
    ]


def full_cases(op: str) -> list[Case]:
    cases: list[Case] = importlib.import_module(f"bench.{op}").cases(CPU, quick=False)
    return cases


# Cases


@pytest.mark.parametrize("case", quick_cases(), ids=lambda case: f"{case.op}-{case.dtype}-{case.parameters}")
def test_contenders_agree(case: Case) -> None:
    watch = Stopwatch(CPU)
    results, absent = attempt(case, case.problems(), lambda problem: run_once(problem, watch)[1])
    assert {"monoidreduce", "torch"} <= set(results)
    assert all(reason.startswith("ModuleNotFoundError") for reason in absent.values())
    for name, result in results.items():
        assert len(result) == 1 + case.leaves
        expected = results[case.checked_by.get(name, "torch")]
        assert max(differences(result, expected)) <= harness.AGREEMENT[case.dtype]


@pytest.mark.parametrize("case", quick_cases(), ids=lambda case: f"{case.op}-{case.dtype}-{case.parameters}")
def test_work_adds_up(case: Case) -> None:
    assert set(case.flops) == set(harness.PHASES)
    assert case.flops["total"] == case.flops["forward"] + case.flops["backward"] > 0
    assert not case.targets


@pytest.mark.parametrize(
    ("op", "dtype", "parameters", "targets"),
    [
        (
            "attention",
            torch.float32,
            {"L": 2048, "d": 64, "causal": False},
            {"forward": 1.0, "backward": 1.0},
        ),
        (
            "attention",
            torch.bfloat16,
            {"L": 2048, "d": 64, "causal": True},
            {"forward": 1.0, "backward": 1.0},
        ),
        ("cross_entropy", torch.float32, {"N": 1024, "V": 32000, "D": 512}, {"total": 1.2}),
        ("cross_entropy", torch.bfloat16, {"N": 1024, "V": 32000, "D": 512}, {"total": 1.0}),
        ("mlp", torch.float32, {"B": 8192, "K": 8192, "d": 128}, {"total": 1.0}),
        ("mlp", torch.bfloat16, {"B": 8192, "K": 8192, "d": 128}, {"total": 1.0}),
    ],
)
def test_the_promised_sizes_have_their_targets(
    op: str, dtype: torch.dtype, parameters: dict[str, Any], targets: dict[str, float]
) -> None:
    assert any(
        case.dtype == dtype and parameters.items() <= case.parameters.items() and case.targets == targets
        for case in full_cases(op)
    )


@pytest.mark.parametrize(("causal", "window"), [(False, None), (True, None), (False, 5), (True, 5)])
def test_attention_counts_the_scores_that_are_seen(causal: bool, window: int | None) -> None:
    case = attention.case(torch.float32, CPU, B=2, H=3, L=16, d=8, causal=causal, window=window)
    scores = (
        torch.ones(16, 16).triu(-16 if window is None else -window).tril(16 if window is None else window)
    )
    pairs = (scores.tril() if causal else scores).sum()
    assert case.flops["forward"] == 2 * 2 * 2 * 3 * 8 * pairs


def test_attention_has_scores_of_the_standard_deviation_that_is_asked_for() -> None:
    case = attention.case(torch.float32, CPU, B=1, H=2, L=64, d=32, N=40, std=6.0)
    assert case.parameters.items() >= {"N": 40, "std": 6.0}.items()
    assert case.flops["forward"] == 2 * 2 * 2 * 32 * 64 * 40
    q, k, v = case.drawn()[0]
    assert k.shape == v.shape == (1, 2, 40, 32)
    assert float((q @ k.mT * 32**-0.5).std()) == pytest.approx(6.0, rel=0.1)
    assert float(v.std()) == pytest.approx(1.0, rel=0.1)


FLEX = ("FlexAttention", "FlexAttention, FLASH")  # kernels are not called here: both are alike


@pytest.mark.parametrize(
    "options",
    [
        {"causal": True},
        {"causal": True, "window": 5},
        {"causal": False, "window": 5},
        {"causal": True, "softcap": 2.0},
        {"causal": False, "bias": True},
    ],
    ids=str,
)
def test_flex_attention_is_asked_for_the_same(options: dict[str, Any]) -> None:
    on_cuda, on_cpu = (
        attention.case(torch.bfloat16, torch.device(device), B=2, H=2, L=32, d=16, **options)
        for device in ("cuda", "cpu")
    )
    inputs, _ = on_cpu.drawn()
    with torch.compiler.set_stance("force_eager"):
        for name in FLEX:
            if flex := on_cuda.contenders.get(name):
                expected = on_cpu.contenders["torch"](*inputs)
                torch.testing.assert_close(flex(*inputs), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", mods.KINDS)
def test_flex_attention_is_asked_for_the_same_functions(name: str) -> None:
    on_cuda, on_cpu = (
        mods.case(torch.bfloat16, torch.device(device), B=2, H=2, L=256, d=16, name=name)
        for device in ("cuda", "cpu")
    )
    inputs, _ = on_cpu.drawn()
    with torch.compiler.set_stance("force_eager"):
        for flex in FLEX:
            found = on_cuda.contenders[flex](*inputs)
            torch.testing.assert_close(found, on_cpu.contenders["torch"](*inputs), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", mods.KINDS)
@pytest.mark.parametrize("L", [256, 512])
def test_masks_keep_as_many_scores_as_are_counted(name: str, L: int) -> None:
    kind = mods.KINDS[name](2, L)
    row, column = torch.arange(L)[:, None], torch.arange(L)
    assert int(kind.on(CPU).mask_mod(0, 0, row, column).sum()) == kind.pairs


def test_alibi_has_the_slopes_of_its_paper() -> None:
    """Section 3: of 8 heads the sequence starts at 1/2 and is halved from head to head."""
    score_mod = mods.alibi(8, 4).on(CPU).score_mod
    assert score_mod is not None
    found = score_mod(torch.zeros(()), 0, torch.arange(8), torch.tensor(3), torch.tensor(1))
    torch.testing.assert_close(found, -2 * 0.5 ** torch.arange(1.0, 9.0))


def test_plain_attention_stands_beside_what_no_other_operator_computes() -> None:
    for case in mods.cases(CPU, quick=True):
        own = {name for name in case.contenders if name.startswith("monoidreduce")}
        beside = own - {"monoidreduce"}
        if case.op in ("mask_mod document", "mask_mod window", "mask_mod natten"):
            assert not case.checked_by and len(beside) == (case.op != "mask_mod natten")
        else:
            assert beside == {"monoidreduce, plain"}
            assert case.checked_by == dict.fromkeys(("monoidreduce, plain", "torch, plain"), "torch, plain")


def test_attend_is_a_case_of_every_device() -> None:
    for device in ("cpu", "cuda"):
        ops = {case.op for case in mods.cases(torch.device(device), quick=True)}
        assert ops == {*mods.WEIGHTS, *mods.KINDS}


@pytest.mark.parametrize("rows", [kernel_sums.CHUNK - 1, kernel_sums.CHUNK + 1])
@pytest.mark.parametrize("D", [3, 16])
def test_formulas_of_kernel_sums_are_the_definition(rows: int, D: int) -> None:
    x, y, mass = torch.randn(rows, D), torch.randn(20, D), torch.rand(20)
    squares = torch.cdist(x.double(), y.double()).square()
    exponents, mass64 = -squares / (2 * D), mass.double()
    expected = {
        "kernel_sums": exponents.exp() @ mass64,
        "sinkhorn": -(exponents.exp() @ mass64).log(),
        "nearest": (-exponents - mass64).min(1).values,
    }
    for name, kind in kernel_sums.KINDS.items():
        for formula in (kernel_sums.own, kernel_sums.of_products, kernel_sums.of_differences):
            found = kernel_sums.in_chunks(functools.partial(formula, kind))(x, y, mass)
            torch.testing.assert_close(found.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", first_call.FUNCTIONS)
def test_the_first_call_of_every_function_is_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, sizes in first_call.FUNCTIONS[op].items():
        few = {size: min(count, 128) if size in "NMVL" else count for size, count in sizes.items()}
        monkeypatch.setitem(first_call.FUNCTIONS, op, {name: few})
        forward, total = first_call.first_call(op, name, "cpu")
        assert 0 < forward < total


def test_first_calls_are_of_all_functions() -> None:
    functions = first_call.FUNCTIONS
    assert {sizes["name"] for sizes in functions["folds"].values()} == {*folds.FOLDS}
    assert {sizes["name"] for sizes in functions["mods"].values()} == {*mods.KINDS, *mods.WEIGHTS}
    assert {sizes["name"] for sizes in functions["captured"].values()} == {*captured.LEARNED}
    assert {sizes["name"] for sizes in functions["user_losses"].values()} == {*user_losses.LOSSES}
    of_attention = {sizes.get("name") for sizes in functions["payloads"].values()} - {None}
    assert of_attention == {*payloads.ATTENTION} - {"plain"}  # which compiles nothing
    decorated = re.compile(r"^@mr\.statistics\ndef (\w+)", re.M)
    examples = (Path(__file__).parents[2] / "examples").glob("*.py")
    written = {f"{file.stem}.{name}" for file in examples for name in decorated.findall(file.read_text())}
    assert {*functions["examples"]} == written


@pytest.mark.parametrize(
    ("ops", "measured"),
    [(["mods", "attention"], ["mods"]), (["first_call"], [*first_call.FUNCTIONS])],
)
def test_first_calls_are_of_the_operators_that_are_asked_for(
    ops: list[str], measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def child(command: list[str], **options: Any) -> Any:
        if "compileall" in command:
            return None
        started.append((command[2], command[3]))
        last = 10.0 - started.count(started[-1])
        return subprocess.CompletedProcess(command, 0, json.dumps([last, last + 5]))

    started: list[tuple[str, str]] = []
    monkeypatch.setattr(subprocess, "run", child)
    rows = first_call.measure_first_call(CPU, False, ops)
    functions = [(op, name) for op in measured for name in first_call.FUNCTIONS[op]]
    assert [row["op"] for row in rows] == [f"fold {n}" if op == "folds" else n for op, n in functions]
    assert sorted(started) == sorted(2 * functions)
    assert rows[0]["milliseconds"] == {
        "forward": 9.0,
        "forward, cached": 8.0,
        "forward + backward": 14.0,
        "forward + backward, cached": 13.0,
    }


def test_every_peer_is_a_contender_on_a_gpu() -> None:
    peers = {
        "attention": {
            "cuDNN",
            "FlashAttention-2",
            "FlexAttention",
            "FlexAttention, FLASH",
            "FlashAttention-4",
        },
        "cross_entropy": {
            "torch.compile",
            "torch.compile, max-autotune",
            "cut-cross-entropy",
            "Liger",
            "Liger scaled",
            "Liger sm90",
            "QuACK",
        },
        "distillation": {"torch.compile", "Liger"},
        "log_probs": {"torch.compile", "torch chunked", "TRL"},
        "mlp": {
            "torch.compile",
            "torch.compile, max-autotune",
            "torch checkpoint",
            "Liger",
            "Liger, tiled",
        },
        "mods": {"FlexAttention", "FlexAttention, FLASH", "FlashAttention-4", "monoidreduce, plain"},
        "short": {"torch, graphs", "monoidreduce, graphs"},
        "kernel_sums": {"torch.compile", "torch.compile, differences", "KeOps"},
    }
    for op, expected in peers.items():
        cases = importlib.import_module(f"bench.{op}").cases(torch.device("cuda"), quick=False)
        assert expected <= {name for case in cases for name in case.contenders}


@pytest.mark.parametrize(
    ("package", "contender"),
    [
        ("cut_cross_entropy", cross_entropy.cut_cross_entropy),
        ("liger_kernel", cross_entropy.liger),
        ("liger_kernel", cross_entropy.liger_scaled),
        ("liger_kernel", cross_entropy.liger_sm90),
        ("quack", cross_entropy.quack),
        ("trl", log_probs.trl),
        ("pykeops", kernel_sums.keops),
    ],
)
def test_a_peer_is_imported_when_it_is_called(
    package: str, contender: harness.Contender, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = [name for name in sys.modules if name.startswith(f"{package}.")]  # by tests that ran before
    for name in (package, *loaded):
        monkeypatch.setitem(sys.modules, name, None)  # what an import then finds missing
    x = torch.randn(2, 4)
    with pytest.raises(ImportError, match=package):
        contender(x, x, torch.zeros(2, dtype=torch.long))


def test_memory_builds_the_cases() -> None:
    assert set(memory.SWEEPS) == set(run.OPERATORS) - CASES_OF_OTHERS
    for op, (axis, on_cpu, on_cuda, tiny) in memory.SWEEPS.items():
        assert axis in tiny
        assert on_cpu.keys() == on_cuda.keys() == tiny.keys()
        problem = memory.problem(op, "monoidreduce", "float32", "cpu", tiny)
        assert problem.forward().shape == problem.grad_output.shape


@pytest.mark.parametrize("rows", [0, 1])
def test_overhead_is_of_calls_that_record(rows: int) -> None:
    calls = overhead.calls(CPU, rows)
    # kernel_sums is a fold with torch before and after it.
    assert set(calls) == set(run.OPERATORS) - CASES_OF_OTHERS - {"kernel_sums"}
    for call in calls.values():
        result = call.monoidreduce()
        assert result.isfinite().all()
        assert all(leaf_grad is not None for leaf_grad in torch.autograd.grad(result.sum(), call.leaves))


def test_overhead_calls_both_alike() -> None:
    for call in overhead.calls(CPU, 1).values():
        torch.testing.assert_close(call.monoidreduce(), call.torch(), rtol=1e-4, atol=1e-5)


def test_overhead_over_ranks_counts_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is asserted but that collectives are part of it."""
    monkeypatch.setattr(overhead, "ROUNDS", 1)
    with overhead.silent_group() as group:
        rows = overhead.measure_over_ranks(CPU, group)
    assert {row["op"]: row["collectives"] for row in rows} == {
        "cross_entropy": 1,
        "log_probs": 1,
        "distillation": 1,
        "mlp": 2,
        "logsumexp": 1,
        "attention, ulysses": 4,
        "attention, all_gather": 2,
    }
    assert all(row["microseconds"]["collectives"] > 0 for row in rows)
    assert not torch.distributed.is_initialized()


# Harness


def made_up_case(wrong: float = 0.0) -> tuple[Case, list[str]]:
    calls: list[str] = []

    def contender(name: str, factor: float) -> Any:
        def call(x: Tensor, constant: Tensor) -> Tensor:
            calls.append(name)
            return x * constant * factor

        return call

    case = Case(
        op="product",
        dtype=torch.float32,
        device=CPU,
        parameters={"n": 7},
        inputs=lambda: (torch.randn(7), torch.randn(7)),
        leaves=1,
        output=(7,),
        contenders={"monoidreduce": contender("monoidreduce", 1 + wrong), "torch": contender("torch", 1.0)},
        flops={"forward": 7.0, "backward": 7.0, "total": 14.0},
        targets={"total": 1.0},
    )
    return case, calls


def test_summary_is_median_and_quintiles() -> None:
    assert summary([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == {"median": 3.5, "p20": 2.0, "p80": 5.0}


def test_differences_are_relative_norms() -> None:
    a, b = [torch.tensor([1.0]), torch.tensor([3.0, 4.0])], [torch.tensor([1.0]), torch.tensor([3.0, 0.0])]
    assert differences(a, b) == pytest.approx([0, 4 / 3])


def test_contenders_are_timed_in_turn() -> None:
    case, calls = made_up_case()
    row = time_case(case, seconds=0.0)
    assert row["rounds"] == harness.ROUNDS[0]
    timed = calls[-2 * row["rounds"] :]
    rounds = set(zip(timed[::2], timed[1::2], strict=True))
    assert rounds == {("monoidreduce", "torch"), ("torch", "monoidreduce")}  # now one first, now the other
    assert set(row["phases"]) == set(harness.PHASES)
    total = row["phases"]["total"]
    medians = {name: spread["median"] for name, spread in total["milliseconds"].items()}
    assert total["speedup"]["torch"] == medians["torch"] / medians["monoidreduce"]
    assert total["gflops"] == pytest.approx(14 / medians["monoidreduce"] / 1e6)
    assert total["target"] == 1.0
    assert row["phases"]["forward"]["target"] is None


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_wrong_results_are_not_timed(wrong: float) -> None:
    case, _ = made_up_case(wrong)
    with pytest.raises(RuntimeError, match=r"product.*monoidreduce: ValueError: its results differ"):
        time_case(case, seconds=0.0)


@pytest.mark.parametrize("wrong", [0.0, 0.01])
def test_another_function_is_checked_by_its_own_reference(wrong: float) -> None:
    case, _ = made_up_case()
    case.contenders.update(
        {
            "monoidreduce, triple": lambda x, constant: x * constant * (3 + wrong),
            "torch, triple": lambda x, constant: x * constant * 3,
        }
    )
    names = ("monoidreduce, triple", "torch, triple")
    case = replace(case, checked_by=dict.fromkeys(names, "torch, triple"))
    if wrong:
        with pytest.raises(RuntimeError, match="its results differ from torch, triple's by"):
            time_case(case, seconds=0.0)
    else:
        row = time_case(case, seconds=0.0)
        assert row["difference"].keys() == {"monoidreduce", "torch", *names}
        assert max(row["difference"].values()) < 1e-6


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_allowed_for_its_cases_alone(tf32: bool) -> None:
    case, _ = made_up_case(wrong=1e-3 if tf32 else 0.0)
    allowed: set[bool] = set()

    def seen(x: Tensor, constant: Tensor) -> Tensor:
        allowed.add(torch.backends.cuda.matmul.allow_tf32)
        return x * constant

    case.contenders["seen"] = seen
    row = time_case(replace(case, tf32=tf32), seconds=0.0)
    assert row["dtype"] == ("tf32" if tf32 else "float32")
    assert allowed == {tf32} and not torch.backends.cuda.matmul.allow_tf32


def test_a_peer_that_fails_is_reported_and_the_others_are_timed() -> None:
    def missing(x: Tensor, constant: Tensor) -> Tensor:
        importlib.import_module("not_installed_anywhere")
        return x

    case, _ = made_up_case()
    case.contenders.update(
        missing=missing,
        wrong=lambda x, constant: 1.1 * x * constant,
        good=lambda x, constant: x * constant,
    )
    row = time_case(case, seconds=0.0)
    assert row["absent"] == {
        "missing": "ModuleNotFoundError: No module named 'not_installed_anywhere'",
        "wrong": "ValueError: its results differ from torch's by 1.0e-01, 1.0e-01",
    }
    assert set(row["phases"]["total"]["speedup"]) == {"monoidreduce", "torch", "good"}


def test_ours_must_not_fail() -> None:
    case, _ = made_up_case()
    case.contenders["monoidreduce, other"] = case.contenders.pop("monoidreduce")

    def check(problem: Any) -> None:
        raise NotImplementedError("not yet")

    with pytest.raises(RuntimeError, match="monoidreduce, other: NotImplementedError: not yet"):
        attempt(case, case.problems(), check)


@pytest.fixture(scope="module")
def errors_on_a_cpu() -> list[dict[str, Any]]:
    return accuracy.measure_accuracy(CPU, quick=True)


def test_errors_of_losses_are_against_float64(errors_on_a_cpu: list[dict[str, Any]]) -> None:
    rows = [row for row in errors_on_a_cpu if not row["op"].startswith("attention")]
    assert [(row["op"], row["std"]) for row in rows] == [
        (op, std) for op in ("cross_entropy", "distillation") for std in (1.0, 4.0, 8.0)
    ]
    for row in rows:
        beside = {"dW of other classes"} if row["op"] == "cross_entropy" else set()
        assert {"monoidreduce", "torch", "torch, float32 logits"} <= set(row["errors"])
        for name, errors in row["errors"].items():
            assert set(errors) == {"loss", "dX", "dW"} | beside
            assert all(1e-10 < error < 3e-2 for error in errors.values()), (row["op"], row["std"], name)
        # To the rounding of bfloat16, a 512th: neither what is rounded twice nor what has float32 gradients.
        exact = row["errors"]["torch, float32 logits"]
        assert all(1e-3 < exact[part] < 2e-3 for part in ("dX", "dW"))
        assert exact["loss"] < 1e-6


def test_errors_of_attention_are_against_float64(errors_on_a_cpu: list[dict[str, Any]]) -> None:
    rows = [row for row in errors_on_a_cpu if row["op"] == "attention"]
    assert [(row["parameters"].get("N"), row["std"]) for row in rows] == [
        (keys, std) for keys in (None, 6) for std in (1.0, 6.0, 36.0)
    ]
    for row in rows:
        measured = {"monoidreduce", "torch", "math", "torch, 16-bit scores"}
        on_gpus = dict.fromkeys(
            ("cuDNN", "FlashAttention-2", "efficient"), "RuntimeError: its kernels are for GPUs"
        )
        assert row["absent"] == on_gpus
        for measure in ("errors", "largest", "mean"):
            assert set(row[measure]) == measured
            assert all(set(of_parts) == {"out", "d_q", "d_k", "d_v"} for of_parts in row[measure].values())
        # The math path rounds once, to a 512th; some of what saturated rows select is exact.
        assert all(5e-4 < error < 2e-3 for error in row["errors"]["math"].values())
        for name in measured:
            assert all(0 < row["mean"][name][part] < row["largest"][name][part] for part in row["mean"][name])
    # The sharper softmax is, the more do rounded scores cost.
    ratios = [row["mean"]["torch, 16-bit scores"]["d_q"] / row["mean"]["math"]["d_q"] for row in rows[:3]]
    assert 1.5 < ratios[0] < ratios[1] < ratios[2]


def test_errors_of_float32_are_against_float64(errors_on_a_cpu: list[dict[str, Any]]) -> None:
    rows = [row for row in errors_on_a_cpu if row["op"] == "attention in float32"]
    assert [(row["dtype"], row["std"]) for row in rows] == [("float32", std) for std in (1.0, 6.0, 36.0)]
    for row in rows:
        assert set(row["errors"]) == {"monoidreduce", "torch", "math"}
        assert all(0 < error < 1e-4 for of_parts in row["errors"].values() for error in of_parts.values())


def test_the_largest_and_the_mean_error_are_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    def off(case: Case) -> dict[str, harness.Contender]:
        error = torch.tensor([-5.0, *[0.0] * 7])
        return {"monoidreduce": lambda *inputs: reference.attention(*(x.float() for x in inputs)) + error}

    wrong = accuracy.OPERATORS["attention"]._replace(contenders=off)
    monkeypatch.setitem(accuracy.OPERATORS, "attention", wrong)
    row = accuracy.measure_errors("attention", CPU, 1.0, {"B": 1, "H": 2, "L": 4, "d": 8})
    assert row["largest"]["monoidreduce"]["out"] == pytest.approx(5.0, rel=1e-5)
    assert row["mean"]["monoidreduce"]["out"] == pytest.approx(5.0 / 8, rel=1e-5)


def test_attention_is_measured_through_every_backend_on_a_gpu() -> None:
    case = attention.case(torch.bfloat16, torch.device("cuda"), B=1, H=2, L=32, d=16)
    assert set(accuracy.attention_contenders(case)) == {
        "monoidreduce",
        "monoidreduce, sm80",
        "monoidreduce, compensated",
        "torch",
        "math",
        "cuDNN",
        "FlashAttention-2",
        "efficient",
        "torch, 16-bit scores",
    }


def test_float32_attention_is_measured_in_planes_on_a_gpu() -> None:
    case = attention.case(torch.float32, torch.device("cuda"), B=1, H=2, L=32, d=16)
    names = {"monoidreduce", "monoidreduce, emulated", "torch", "math", "efficient"}
    assert set(case.contenders) == set(accuracy.float32_contenders(case)) == names
    biased = attention.case(torch.float32, torch.device("cuda"), B=1, H=2, L=32, d=16, bias=True)
    assert set(biased.contenders) == names
    capped = attention.case(torch.float32, torch.device("cuda"), B=1, H=2, L=32, d=16, softcap=3.0)
    assert set(capped.contenders) == {"monoidreduce", "monoidreduce, emulated", "torch", "torch.compile"}


def test_float32_mlps_are_measured_in_planes_on_a_gpu() -> None:
    case = mlp.case(torch.float32, torch.device("cuda"), B=32, K=32, d=16)
    everyone = {"monoidreduce", "monoidreduce, emulated", "torch", "torch.compile"}
    assert set(case.contenders) == everyone
    case = mlp.gated_case(torch.float32, torch.device("cuda"), B=32, K=32, d=16)
    assert set(case.contenders) == everyone | {"torch checkpoint"}


@pytest.mark.parametrize("loss", ("forward_kl", "jsd"))
def test_float32_distillation_is_measured_in_planes_on_a_gpu(loss: str) -> None:
    case = distillation.case(torch.float32, torch.device("cuda"), N=64, V=100, D=16, E=24, loss=loss)
    assert set(case.contenders) == {"monoidreduce", "monoidreduce, emulated", "torch", "torch.compile"}


def test_the_machine_is_named() -> None:
    facts = environment(CPU, "the command")
    assert facts["command"] == "the command"
    assert facts["torch"] == torch.__version__
    assert facts["threads"] == torch.get_num_threads()
    assert facts["product_gflops"].keys() == {"float32", "bfloat16"}
    assert facts["copy_gbytes"] > 0
    assert set(facts["peers"]) >= {"flash-attn-4", "liger-kernel"}
    assert facts["driver"] is None
    assert all(
        facts[name] for name in ("device", "monoidreduce", "commit", "date", "python", "system", "cpu_isa")
    )


# Report


def phase(own: float, theirs: float, target: float | None) -> dict[str, Any]:
    milliseconds = {
        "monoidreduce": {"median": own, "p20": own * 0.9, "p80": own * 1.1},
        "torch": {"median": theirs, "p20": theirs, "p80": theirs},
        "other": {"median": 2 * own, "p20": 2 * own, "p80": 2 * own},
    }
    speedup = {name: spread["median"] / own for name, spread in milliseconds.items()}
    return {"milliseconds": milliseconds, "speedup": speedup, "gflops": 50.0, "target": target}


def document(
    total_target: float, load_average: float = 0.2, flat: bool = True, over_ranks: float = 90.0
) -> dict[str, Any]:
    calls = [
        call + backward
        for call in ("overhead", "one row", "torch, one row")
        for backward in ("", ", with backward")
    ]
    return {
        "environment": {
            "device": "a processor",
            "threads": 2,
            "load_average": load_average,
            "product_gflops": {"float32": 100, "bfloat16": 200},
            "monoidreduce": "1.2.3",
            "torch": "2.6.0",
            "peers": {"triton": "3.3", "liger-kernel": None},
            "commit": "abc",
            "date": "2030-01-01",
            "command": "python bench/run.py",
        },
        "speed": [
            {
                "op": "attention",
                "dtype": "float32",
                "parameters": {"L": 2048, "causal": True, "other": False},
                "phases": {
                    "forward": phase(10.0, 12.0, 1.0),
                    "backward": phase(20.0, 18.0, None),
                    "total": phase(30.0, 30.0, total_target),
                },
                "peak_bytes": {"monoidreduce": 3 << 19, "torch": 1 << 30, "other": 7 << 20},
                "step_peak_bytes": {"monoidreduce": 3 << 19, "other": 2 << 20},
                "sm_clock": {"other": 1605.0},
                "absent": {"missing": "ImportError: no such thing"},
            }
        ],
        "accuracy": [
            {
                "op": "cross_entropy",
                "parameters": {"N": 4},
                "std": std,
                "errors": {
                    "torch": {"loss": 1e-4, "dX": 2e-3, "dW": 3e-3},
                    "monoidreduce": {"loss": 1e-7 * std, "dX": 2e-3, "dW": 3e-3},
                },
                "absent": {},
            }
            for std in (1.0, 4.0)
        ],
        "memory": [
            {
                "op": "mlp",
                "dtype": "bfloat16",
                "parameters": {"B": 8},
                "axis": "K",
                "sizes": [1024, 2048],
                "bytes": {"monoidreduce": [1 << 20, 3 << 19], "torch": [1 << 30, 2 << 30]},
                "limit": 64 << 20,
                "flat": flat,
            }
        ],
        "overhead": [{"op": "mlp", "microseconds": dict.fromkeys(calls, 25.0), "limit": 30.0}],
        "host": [
            {
                "op": "mlp",
                "collectives": 2,
                "microseconds": {"alone": 30.0, "over ranks": over_ranks, "collectives": 20.5},
                "limit": 60.0,
            }
        ],
    }


def test_report_states_what_was_reached() -> None:
    text = report.tables(document(total_target=1.0))
    assert "a processor, 2 threads, torch 2.6.0, monoidreduce 1.2.3 (abc), 2030-01-01" in text
    assert "attention L 2048, causal" in text
    assert "10±10% vs 12±0%: 1.20x, 1.0x met" in text
    assert "20±10% vs 18±0%: 0.90x " in text
    assert "| 50% " in text
    cells = " ".join(text.split())
    assert "| monoidreduce | 10 + 20, 50%, 2 MiB | | torch | 12 + 18, 50%, 1024 MiB |" in cells
    assert "| other | 20 + 40, 25%, 2 MiB (forward 7), 1605 MHz |" in cells
    assert "becomes gradients. triton 3.3\n" in text
    assert "| monoidreduce | 1.0e-07, 2.0e-03, 3.0e-03 | 4.0e-07, 2.0e-03, 3.0e-03 |" in cells
    assert "- missing in attention, 1 times: ImportError: no such thing" in text
    assert "1.0, 1.5" in text
    assert "1024.0, 2048.0" in text
    assert "busy" not in text
    assert "| mlp | 30.0 | 90.0 | 60.0, 60 us met | 20.5 of 2 |" in cells
    assert text.endswith("All targets met.")


def test_report_abbreviates_a_whole_hash() -> None:
    measured = document(total_target=1.0)
    measured["environment"]["commit"] = "0123456789" * 4
    assert "monoidreduce 1.2.3 (012345678901), 2030-01-01" in report.tables(measured)


def test_report_states_what_was_missed() -> None:
    text = report.tables(document(total_target=1.2, load_average=3.5, flat=False, over_ranks=91.5))
    assert "1.00x, 1.2x **MISSED**" in text
    assert "- attention L 2048, causal float32 total: 1.00x of 1.2x" in text
    assert "- mlp bfloat16: 1.5 MiB, grows with K" in text
    assert "- mlp over ranks: 61.5 us more than without a group" in text
    assert "The machine was busy (load average 3.5)" in text
    assert "All targets met" not in text


def attention_errors() -> list[dict[str, Any]]:
    """Two sweeps; in the second torch's math path failed once."""
    parts = ("out", "d_q", "d_k", "d_v")
    errors = {
        "math": [1.0, 1.0, 2.0, 2.0],
        "monoidreduce": [1.0, 2.0, 3.0, 5.0],
        "cuDNN": [1.0, 7.0, 10.0, 3.0],
    }
    measured = {name: dict(zip(parts, values, strict=True)) for name, values in errors.items()}
    halves = {name: {part: value / 2 for part, value in of.items()} for name, of in measured.items()}
    sweep = [
        {
            "op": "attention",
            "parameters": {"L": 4},
            "std": std,
            "errors": measured,
            "largest": measured,
            "mean": halves | {"cuDNN": measured["cuDNN"]},
            "absent": {"efficient": "RuntimeError: no"},
        }
        for std in (1.0, 36.0)
    ]
    without = {
        measure: {"monoidreduce": measured["monoidreduce"]} for measure in ("errors", "largest", "mean")
    }
    few = [row | {"parameters": {"L": 4, "N": 6}} for row in sweep]
    return [*sweep, few[0], few[1] | without | {"absent": {"math": "RuntimeError: no"}}]


def test_report_has_errors_of_attention_beside_torchs_math_path() -> None:
    results = document(total_target=1.0)
    results["accuracy"] += attention_errors()
    text = report.tables(results)
    cells = " ".join(text.split())
    assert "### Accuracy of loss, dX and dW\n" in text
    assert "### Accuracy of out, d_q, d_k and d_v\n" in text
    assert (
        "| attention L 4 | std 1 | std 36 |" in cells and "| attention L 4, N 6 | std 1 | std 36 |" in cells
    )
    assert "| math | 1.0e+00, 1.0e+00, 2.0e+00, 2.0e+00 | - |" in cells
    assert "| monoidreduce | 1.0/1.0, 2.0/2.0, 1.5/1.5, 2.5/2.5 |" in cells
    assert "| cuDNN | 1.0/2.0, 7.0/14.0, 5.0/10.0, 1.5/3.0 |" in cells
    assert "| math | 1.0/1.0" not in cells
    assert "- efficient in attention, 3 times: RuntimeError: no" in text
    assert "- math in attention, 1 times: RuntimeError: no" in text


@pytest.mark.parametrize("file", sorted(RESULTS.glob("*.json")), ids=lambda file: file.stem)
def test_results_of_earlier_runs_are_reported_and_drawn(file: Path) -> None:
    results = json.loads(file.read_text())
    text = report.tables(results)
    for row in results.get("accuracy", []):
        parts = ", ".join(f"{error:.1e}" for error in row["errors"]["monoidreduce"].values())
        assert parts in text
    drawn = plot.panels({"accuracy": []} | results)
    assert len(drawn) >= len({row["op"] for row in results.get("accuracy", [])}) * 3


def test_tables_are_markdown() -> None:
    for block in report.tables(document(total_target=1.0)).split("\n\n"):
        lines = block.splitlines()
        if lines[0].startswith("|"):
            assert len({line.count("|") for line in lines}) == 1
            assert len({len(line) for line in lines}) == 1
            assert set(lines[1]) == {"|", " ", "-"}


def test_the_longer_list_of_a_peer_table_runs_down() -> None:
    row = document(total_target=1.0)["speed"][0]
    names_down = report.peer_table([row], {"float32": 100}).splitlines()
    assert [line.split("|")[1].strip() for line in names_down[2:]] == ["monoidreduce", "torch", "other"]
    cases_down = report.peer_table([row] * 4, {"float32": 100}).splitlines()
    assert [line.split("|")[1].strip() for line in cases_down[2:]] == ["L 2048, causal, float32"] * 4


def test_decode_is_measured_and_reported() -> None:
    rows = measure_decode(CPU, quick=True)
    (row,) = rows
    sizes = row["parameters"]
    elements = sizes["B"] * sizes["d"] * (sizes["H"] + 2 * sizes["Hkv"] * sizes["N"])
    assert row["bytes"] == 2 * elements and not row["absent"]
    row["milliseconds"] = {"monoidreduce": {"median": 0.5}, "torch": {"median": 1.0}}
    row["bytes"] = 10**9
    cells = report.decode_table(rows, 4000.0).splitlines()[-1].split("|")
    assert [cell.strip() for cell in cells[2:4]] == ["500 us, 2000 GB/s, 50%", "1e+03 us, 1000 GB/s, 25%"]


def test_forward_passes_are_measured_and_reported() -> None:
    rows = measure_forward(CPU, quick=True)
    (row,) = rows
    assert set(row["milliseconds"]) == {PRODUCT, "monoidreduce", HALF_IGNORED} and not row["peak_bytes"]
    row["milliseconds"] = {PRODUCT: {"median": 9.0}, "monoidreduce": {"median": 10.0}}
    row["peak_bytes"] = {"monoidreduce": 3 << 20}
    cells = report.forward_table(rows).splitlines()[-1].split("|")
    assert [cell.strip() for cell in cells[2:4]] == ["10, 0.90, 3.0 MiB", "9"]


@pytest.mark.parametrize(("names", "rounds"), [("abcd", 4), ("abcde", 10), ("ab", 2), ("a", 2)])
def test_each_contender_is_as_often_behind_each_other(names: str, rounds: int) -> None:
    assert harness.balanced_rounds(names) == rounds and not list(harness.in_turn([], rounds))
    order = list(harness.in_turn(list(names), 3 * rounds))
    laps = [order[at : at + len(names)] for at in range(0, len(order), len(names))]
    assert len(laps) == 3 * rounds and all(sorted(lap) == list(names) for lap in laps)
    for part in (laps[:rounds], laps[rounds : 2 * rounds], laps[2 * rounds :]):
        behind = Counter(pair for lap in part for pair in pairwise(lap))
        assert set(behind) == set(permutations(names, 2))
        assert len(set(behind.values())) <= 1
    assert len(names) < 3 or laps[:rounds] != laps[rounds : 2 * rounds]


# Models


@pytest.fixture
def a_llama() -> Any:
    pytest.importorskip("transformers", minversion="5.4")
    return models.base_model(models.QUICK, CPU)


def a_liger(monkeypatch: pytest.MonkeyPatch, leaves_out: str = "") -> None:
    """A library in the place of Liger, whose patches are its own names of what transformers has."""

    def apply_liger_kernel_to_llama(model: Any) -> None:
        module = sys.modules[type(model).__module__]
        rope = module.apply_rotary_pos_emb
        parts = {
            "forward": [model],
            "norm": [model.model.norm],
            "mlp": [layer.mlp for layer in model.model.layers],
        }
        for layer in model.model.layers:
            parts["norm"] += [layer.input_layernorm, layer.post_attention_layernorm]
        for part, patched in parts.items():
            for place in patched if part != leaves_out else ():
                place.forward = named(place.forward)
        module.apply_rotary_pos_emb = named(rope)

    def named(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__module__ = "liger_kernel.made_up"
        return call

    package = ModuleType("liger_kernel.transformers")
    package.apply_liger_kernel_to_llama = apply_liger_kernel_to_llama  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", package)


def test_steps_of_models_are_measured_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", minversion="5.4")
    a_liger(monkeypatch)
    leave_out_code(monkeypatch)
    rows = list(models.measure_models(CPU, quick=True))
    assert [row["parameters"] for row in rows] == [
        {"batch": 2, "length": 24},
        {"batch": 2, "length": 24, "checkpointing": True},
        {"batch": 1, "length": 40, "sequences": 3},
    ]
    own = ("monoidreduce", "transformers")
    everyone = {"Liger", *own, models.UNCOMPILED, models.THEIRS_COMPILED, models.LIGER_COMPILED}
    for row in rows:
        packed = {"monoidreduce, position_ids"} if "sequences" in row["parameters"] else set()
        assert set(row["milliseconds"]) == set(row["difference"]) == set(row["parts"]) == everyone | packed
        assert set(row["absent"]) == ({"transformers, flash-attn"} if packed else set())
        assert row["difference"]["transformers"] == {"loss": 0.0, "gradients": 0.0}
        assert 0 < row["difference"]["monoidreduce"]["gradients"] < models.AGREEMENT / 5
        assert row["parts"]["monoidreduce"]["attention"] == "monoidreduce"
        assert row["parts"]["monoidreduce"]["loss"].startswith("monoidreduce.")
        assert row["parts"]["transformers"]["attention"] == "sdpa"
        for name in ("monoidreduce", models.THEIRS_COMPILED, models.LIGER_COMPILED):
            assert row["parts"][name]["layers"] == "monoidreduce.integrations._layers"
        for name in ("transformers", models.UNCOMPILED):
            assert row["parts"][name]["layers"].startswith("transformers.")
        for part in models.LIGERS_PARTS:
            for name in (models.LIGER, models.LIGER_COMPILED):
                assert row["parts"][name][part] == "liger_kernel.made_up"
            assert row["parts"]["transformers"][part].startswith("transformers.")
    text = report.tables(document(total_target=1.0) | {"models": rows})
    assert "- Liger: forward of liger_kernel, loss of transformers, norm of liger_kernel" in text
    assert text.count("a tiny Llama batch 2, length 24") == 2 and "All targets met" in text


def test_ligers_patches_are_there_in_its_turns_alone(a_llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a_liger(monkeypatch)
    module = sys.modules[type(a_llama).__module__]
    before = dict(vars(module))
    contender = models.liger(models.copy_of(a_llama))
    assert vars(module) == before
    with pytest.raises(KeyError), contender.turn():
        assert module.apply_rotary_pos_emb.__module__ == "liger_kernel.made_up"
        raise KeyError
    assert vars(module) == before


@pytest.mark.parametrize("part", ["forward", "norm", "mlp"])
def test_a_patch_of_liger_that_is_not_in_effect_is_refused(
    a_llama: Any, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    a_liger(monkeypatch, leaves_out=part)
    with pytest.raises(RuntimeError, match=rf"not in effect: {part} of transformers\.[a-z_.]*$"):
        models.liger(a_llama)


def test_contenders_of_a_model_share_its_weights(a_llama: Any) -> None:
    copied = models.ours(models.copy_of(a_llama)).model
    weights, others = list(a_llama.parameters()), list(copied.parameters())
    assert all(a is b for a, b in zip(weights, others, strict=True))
    assert copied.lm_head.weight is a_llama.model.embed_tokens.weight
    assert copied.config is not a_llama.config and a_llama.config._attn_implementation == "sdpa"


def test_models_are_of_several_families() -> None:
    pytest.importorskip("transformers", minversion="5.4")
    scale = models.QUICK._replace(family="Qwen3", config=models.QUICK.config | {"head_dim": 32})
    base = models.base_model(scale, CPU)
    assert base.config.model_type == "qwen3" and base.model.layers[0].self_attn.q_proj.out_features == 4 * 32
    step, builds = models.Step(1, 40), {models.OURS: models.ours_uncompiled, models.THEIRS: models.plain}
    contenders = {name: build(models.copy_of(base)) for name, build in builds.items()}
    differences, absent = models.compare(
        models.problems_of(step, contenders, CPU), contenders, Stopwatch(CPU)
    )
    assert set(differences) == set(builds) and not absent


def test_packed_sequences_are_told_by_positions_and_by_bounds() -> None:
    batch, told = models.batch_of(models.Step(1, 64, sequences=8), 100, CPU)
    starts = told["cu_seq_lens_q"][:-1].tolist()
    assert len(starts) == 8 and starts[0] == 0 and told["cu_seq_lens_q"][-1] == 64
    assert (batch["position_ids"][0] == 0).nonzero().flatten().tolist() == starts
    assert told["max_length_q"] == told["cu_seq_lens_k"].diff().max() == batch["position_ids"].max() + 1
    assert (batch["labels"][0] == -100).nonzero().flatten().tolist() == starts
    assert ((batch["labels"] == batch["input_ids"]) | (batch["labels"] == -100)).all()


def test_a_model_that_sees_other_sequences_is_not_timed(a_llama: Any) -> None:
    contenders = {
        name: build(models.copy_of(a_llama))
        for name, build in models.BUILD.items()
        if name in ("monoidreduce", "transformers")
    }
    step = models.Step(1, 40, sequences=3)
    problems = models.problems_of(step, contenders, CPU)
    whole = models.problems_of(models.Step(1, 40), contenders, CPU)
    watch = Stopwatch(CPU)
    _, absent = models.compare(
        problems | {"Liger": whole["transformers"]}, contenders | {"Liger": contenders["transformers"]}, watch
    )
    assert list(absent) == ["Liger"] and "its results differ from transformers'" in absent["Liger"]
    with pytest.raises(RuntimeError, match="monoidreduce: ValueError: its results differ"):
        models.compare(problems | {"monoidreduce": whole["monoidreduce"]}, contenders, watch)


def model_row(theirs: float, liger: float, peak: int) -> dict[str, Any]:
    times = {"monoidreduce": 10.0, "transformers": theirs, "Liger": liger}
    return {
        "op": "a model",
        "parameters": {"batch": 2, "checkpointing": True},
        "milliseconds": {
            name: {phase: {"median": time / 2} for phase in harness.PHASES} for name, time in times.items()
        },
        "speedup": {name: time / 10.0 for name, time in times.items()},
        "peak_bytes": {"monoidreduce": peak, "transformers": 8 << 30, "Liger": 2 << 30},
        "parts": {},
        "absent": {},
        "targets": {"transformers": 1.15, "Liger": 1.05},
    }


def test_report_states_which_targets_of_models_were_reached() -> None:
    reached = document(total_target=1.0) | {"models": [model_row(12.0, 10.5, 2 << 30)]}
    cells = " ".join(report.tables(reached).split())
    assert "| a model batch 2, checkpointing | 5 + 5, 2.0 GiB | 6 + 6, 8.0 GiB: 1.20x, 1.15x met |" in cells
    assert "| 5.25 + 5.25, 2.0 GiB: 1.05x, 1.05x met, memory met |" in cells and "All targets met." in cells
    text = report.tables(document(total_target=1.0) | {"models": [model_row(11.0, 10.0, 3 << 30)]})
    assert "1.10x, 1.15x **MISSED**" in text and "1.05x **MISSED**, memory **MISSED**" in text
    for miss in (
        "beside transformers: 1.10x of 1.15x",
        "beside Liger: 1.00x of 1.05x",
        "3.0 GiB, Liger 2.0 GiB",
    ):
        assert f"- a model batch 2, checkpointing{':' if 'GiB' in miss else ''} {miss}" in text


def test_the_promised_steps_have_their_targets() -> None:
    steps = {tuple(step.parameters().items()): step.targets for step in models.ON_CUDA.steps}
    for size in ((2, 4096), (1, 16384)):
        plain = (("batch", size[0]), ("length", size[1]))
        assert steps[plain] == {"transformers": 1.15, "Liger": 1.05}
        assert steps[(*plain, ("checkpointing", True))] == {"transformers": 1.08, "Liger": 1.05}
    others = (models.QUICK, models.ON_CPU, models.QWEN3_ON_CUDA)
    assert not any(step.targets for scale in others for step in scale.steps)


def test_without_transformers_no_model_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    assert list(models.measure_models(CPU, quick=True)) == []
    assert capsys.readouterr().err == "models are not measured: transformers is not installed\n"


# Plots


def measured(op: str, parameters: dict[str, Any]) -> dict[str, Any]:
    phases = {name: phase(10.0, 12.0, None) for name in harness.PHASES}
    peak = {"monoidreduce": 1 << 20, "torch": 1 << 30, "other": 7 << 20}
    return {"op": op, "dtype": "bfloat16", "parameters": parameters, "phases": phases, "peak_bytes": peak}


def test_plots_are_of_what_was_swept_over() -> None:
    lengths = [
        {"B": 16384 // L, "H": 16, "L": L, "d": 128, "causal": causal}
        for L in (512, 256)
        for causal in (0, 1)
    ]
    rows = [measured("attention", parameters) for parameters in [*lengths, lengths[0] | {"d": 64}]]
    groups = [(axis, [row["parameters"][axis] for row in group]) for axis, group in plot.sweeps(rows)]
    assert groups == [("L", [256, 512]), ("d", [64, 128]), ("L", [256, 512])]


def test_the_curve_over_workspaces_has_no_other_tier() -> None:
    """The curve is ours with the kernels of dispatch's choice; a forced tier is a point of its own."""
    pyplot = pytest.importorskip("matplotlib.figure")
    times = {"monoidreduce": 3.0, "monoidreduce, 1 GiB": 2.0, "monoidreduce, sm80": 9.0, "torch": 4.0}
    row = measured("cross_entropy", {"N": 8, "V": 64}) | {
        "peak_bytes": dict.fromkeys(times, 1 << 20) | {"monoidreduce, 1 GiB": 1 << 30}
    }
    row["phases"]["total"]["milliseconds"] = {name: {"median": time} for name, time in times.items()}
    axes = pyplot.Figure().subplots()
    plot._memory(row, list(times))(axes)
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.lines}
    assert drawn == {"monoidreduce": [3.0, 2.0], "monoidreduce, sm80": [9.0], "torch": [4.0]}


def test_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = document(total_target=1.0)
    results["speed"] += [measured("mlp", {"d": d}) for d in (64, 128)]
    results["speed"] += [measured("cross_entropy", {"N": 8, "V": V}) for V in (64, 128)]
    # Two sweeps of two phases and peaks of memory, two cases of time against memory, three errors.
    assert len(plot.panels(results)) == 11
    assert plot.save_plot(tmp_path / "plot.png", results)
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_errors_are_drawn_by_what_was_measured() -> None:
    """A panel for each part of each sweep; a contender that failed somewhere has a point less."""
    pyplot = pytest.importorskip("matplotlib.figure")
    rows = attention_errors()
    drawn = plot.panels({"environment": {"product_gflops": {"bfloat16": 1}}, "speed": [], "accuracy": rows})
    titles, points = [], []
    for draw in drawn:
        axes = pyplot.Figure().subplots()
        draw(axes)
        titles.append(axes.get_title())
        points.append({line.get_label(): list(line.get_ydata()) for line in axes.lines})
    assert titles == [
        f"attention: {part}\n{size}" for size in ("L 4", "L 4, N 6") for part in ("out", "d_q", "d_k", "d_v")
    ]
    assert points[1] == {"math": [1.0, 1.0], "monoidreduce": [2.0, 2.0], "cuDNN": [7.0, 7.0]}
    assert points[5] == {"math": [1.0], "monoidreduce": [2.0, 2.0], "cuDNN": [7.0]}


def test_nothing_to_plot(tmp_path: Path) -> None:
    assert not plot.save_plot(tmp_path / "plot.png", document(total_target=1.0) | {"accuracy": []})


# What the README and docs/benchmarks.md show


@pytest.fixture(scope="module")
def committed() -> list[dict[str, Any]]:
    return publish.committed()


def test_pages_show_the_committed_results(committed: list[dict[str, Any]]) -> None:
    for page, block in publish.pages(committed).items():
        text = page.read_text("utf-8")
        assert publish.replace_block(text, block) == text, f"python bench/publish.py would change {page}"


def test_the_readmes_table_has_the_headlines(committed: list[dict[str, Any]]) -> None:
    _, rule, *rows = publish.headline_table(committed).splitlines()
    assert len(rows) == len(publish.HEADLINES) == 8 and set(rule) == {"|", "-", " "}
    for headline, line in zip(publish.HEADLINES, rows, strict=True):
        title, ours, other, ratio, torchs, traffic = (cell.strip() for cell in line.split("|")[1:-1])
        row = publish.find(committed, headline)
        medians = {name: times["median"] for name, times in row["phases"]["total"]["milliseconds"].items()}
        fastest = min((name for name in medians if not name.startswith("monoid")), key=medians.__getitem__)
        assert title == headline.title
        assert ours == f"{medians['monoidreduce']:.3g} ms, {mebibytes(row, 'monoidreduce')}"
        assert other == f"{fastest}: {medians[fastest]:.3g} ms, {mebibytes(row, fastest)}"
        assert ratio == f"{medians[fastest] / medians['monoidreduce']:.2f}x"
        assert torchs == f"{medians['torch']:.3g} ms, {mebibytes(row, 'torch')}"
        counted = [
            one
            for document in committed
            for one in document.get("traffic", [])
            if "H100" in document["environment"]["device"]
            and (one["op"], one["parameters"]) == (headline.op, headline.parameters)
        ]
        moved = sum(one["counter"][way] for one in counted for way in ("read", "written"))
        compulsory = sum(one["compulsory"] for one in counted)
        assert traffic == (f"{moved / compulsory:.1f}x" if counted else "-")
        assert len(counted) in (0, 2)


def mebibytes(row: dict[str, Any], name: str) -> str:
    return f"{row['step_peak_bytes'][name] / 2**20:.0f} MiB"


def drawn_bars(svg: Path) -> tuple[list[str], dict[str, float]]:
    """All text of a chart, and the length of each bar by its id."""
    tree = ElementTree.parse(svg)
    space = "{http://www.w3.org/2000/svg}"
    texts = [text.text or "" for text in tree.iter(f"{space}text")]
    lengths = {}
    for group in tree.iter(f"{space}g"):
        if re.fullmatch(r"(time|memory)-\d+-\d+", group.get("id", "")):
            path = group[0].get("d", "")
            xs = [float(x) for x in re.findall(r"[ML] (\S+) ", path)]
            lengths[group.get("id", "")] = max(xs) - min(xs)
    return texts, lengths


def assert_draws(svg: Path, groups: dict[str, list[plot.Bar]]) -> None:
    texts, lengths = drawn_bars(svg)
    bars = [bar for group in groups.values() for bar in group]
    shown = [*groups, *(text for bar in bars for text in (bar.name, bar.time, bar.memory))]
    assert sorted(texts) == sorted(shown)
    assert len(lengths) == 2 * len(bars)
    for index, group in enumerate(groups.values()):
        for kind, values in (
            ("time", [bar.milliseconds for bar in group]),
            ("memory", [bar.mebibytes for bar in group]),
        ):
            drawn = [lengths[f"{kind}-{index}-{at}"] for at in range(len(group))]
            scale = max(drawn) / max(values)
            assert drawn == pytest.approx([value * scale for value in values], abs=1e-3)


def test_the_chart_shows_the_committed_results(committed: list[dict[str, Any]]) -> None:
    groups = publish.headline_bars(committed)
    assert [bars[0].name for bars in groups.values()] == ["monoidreduce"] * len(groups)
    assert_draws(publish.CHART, groups)


def test_a_chart_is_drawn_alike_every_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    groups = {
        "a layer": [plot.Bar("monoidreduce", 1.0, 7.0), plot.Bar("torch", 3.25, 0.4)],
        "another": [plot.Bar("monoidreduce", 12.0, 2048.0)],
    }
    for name in ("one.svg", "other.svg"):
        plot.save_bars(tmp_path / name, groups)
    assert_draws(tmp_path / "one.svg", groups)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "other.svg").read_bytes()


def test_a_headline_that_was_not_measured_is_an_error(committed: list[dict[str, Any]]) -> None:
    headline = publish.Headline("a layer", "mlp", {"B": 1}, False)
    with pytest.raises(LookupError, match=r"no result of mlp \{'B': 1\} in bfloat16 on NVIDIA H100"):
        publish.find(committed, headline)


def test_what_the_readme_says_of_the_results(committed: list[dict[str, Any]]) -> None:
    """The numbers beside those of the table."""
    text = " ".join(publish.README.read_text("utf-8").split())
    rows, short, long_on_h200 = [], [], []
    for document in committed:
        device, command = document["environment"]["device"], document["environment"]["command"]
        of_short_calls = "run.py short" in command  # beside torch alone
        if device == publish.DEVICE and not of_short_calls:
            rows += document["speed"]
        elif device == "NVIDIA H200":
            on = short if of_short_calls else long_on_h200
            on += document["speed"]
    losses = [row for row in rows if row["op"] in ("cross_entropy", "distillation")]
    slower: dict[bool, list[float]] = {False: [], True: []}  # the Jensen-Shannon divergence, in two passes
    for row in losses:
        if "ignored" not in row["parameters"]:
            ratio = publish.cost(row, "monoidreduce").milliseconds / publish.others(row)[0].milliseconds
            slower[row["parameters"].get("loss") == "jsd"].append(ratio)
    assert f"take {min(slower[False]):.1f} to {max(slower[False]):.1f} times as long" in text
    assert f'the loss "jsd" {max(slower[True]):.1f} times' in text
    ratios = [
        publish.cost(row, "monoidreduce").milliseconds / publish.cost(row, "torch").milliseconds
        for row in short
    ]
    spread = f"{min(ratios):.1f} to {max(ratios):.1f} times as long as torch's (H200)"
    assert f"Steps of about 0.1 ms take {spread}" in text
    packed = {"T": 16384, "sequences": 32, "equal": False, "H": 16, "d": 128, "causal": True}
    row = publish.find(committed, publish.Headline("", "attention_varlen", packed, False), "NVIDIA H200")
    ratio = publish.cost(row, "monoidreduce").milliseconds / publish.others(row)[0].milliseconds
    assert f"packed sequences of random lengths, {ratio:.1f} times (H200)" in text
    calls = [row["microseconds"] for document in committed for row in document["overhead"]]
    longest = max(times["one row"] / times["torch, one row"] for times in calls)
    assert f"up to {longest:.1f} times as long as torch's" in text
    of_losses = [row["errors"] for document in committed for row in document.get("accuracy", [])]
    of_losses = [errors for errors in of_losses if "torch, float32 logits" in errors]
    ours, theirs = (
        max(
            errors[name][part] / errors["torch, float32 logits"][part]
            for errors in of_losses
            for part in ("dX", "dW")
        )
        for name in ("monoidreduce", "torch")
    )
    assert f"at most {ours:.1f} times the error" in text
    assert f"up to {theirs:.0f} times that error" in text
    on_h200 = [d for d in committed if d["environment"]["device"] == "NVIDIA H200"]
    steps = {row["op"]: row for document in on_h200 for row in document.get("models", [])}

    def times_and_memory(model: str) -> list[str]:
        times, peaks = steps[model]["milliseconds"], steps[model]["peak_bytes"]
        return [
            f"{times[name]['total']['median']:.0f} ms and {peaks[name] / 2**30:.1f} GiB"
            for name in (models.OURS, models.THEIRS, models.THEIRS_COMPILED, models.LIGER)
        ]

    ours, theirs, compiled, ligers = times_and_memory("Llama-3.2-1B")
    told = f"takes {ours} on an H200. transformers alone takes {theirs}, with compiled layers {compiled}"
    assert f"of Llama-3.2-1B's shape with 2 x 4096 tokens {told}, Liger's patches {ligers}" in text
    ours, theirs, compiled, ligers = times_and_memory("Qwen3-1.7B")
    told = f"takes {ours}; transformers {theirs}, with compiled layers {compiled}, Liger {ligers}"
    assert f"Of Qwen3-1.7B's shape, with 8192 tokens, it {told}" in text
    head = {"N": 8192, "V": 128256, "D": 4096}
    fold, built_in = (
        publish.cost(row, "monoidreduce")
        for op in ("fold token_stats", "cross_entropy")
        for document in on_h200
        for row in document["speed"]
        if (row["op"], row["dtype"], row["parameters"]) == (op, "bfloat16", head)
    )
    told = "for 8192 tokens, 128256 classes and width 4096 on an H200"
    assert f"takes {fold.milliseconds:.1f} ms and {fold.mebibytes:.0f} MiB {told}" in text
    told = f"takes {built_in.milliseconds:.1f} ms and {built_in.mebibytes:.0f} MiB"
    assert f"The built-in cross entropy {told}" in text
    slowest = min(
        publish.others(row)[0].milliseconds / publish.cost(row, "monoidreduce").milliseconds
        for row in rows + long_on_h200
        if row["op"] == "attention" and row["dtype"] == "bfloat16"
    )
    assert f"within {math.ceil(100 / slowest - 100)} % of FlashAttention and cuDNN" in text


# Command


def test_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = str(tmp_path / "plot.svg")
    assert run.main(["mlp", "--quick", "--device", "cpu", "--out", str(tmp_path), f"--plot={picture}"]) == 0
    printed = capsys.readouterr().out
    (file,) = tmp_path.glob("*_cpu.json")
    results = json.loads(file.read_text())
    assert {row["op"] for row in results["speed"]} == {"mlp"}
    assert not results["memory"]
    assert not results["overhead"]
    assert results["environment"]["command"] == "python bench/run.py mlp --quick --device cpu"
    assert report.main([str(file)]) == 0
    assert printed.startswith(capsys.readouterr().out)


def test_an_interrupted_run_leaves_no_half_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(path: Path, text: str) -> None:
        path.write_bytes(text.encode()[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        run.main(
            ["mlp", "--quick", "--device", "cpu", "--out", str(tmp_path), "--plot", f"{tmp_path}/plot.png"]
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["matmul"], "what: matmul, expected any of attention"),
        (["--plot", "plot.txt"], "argument --plot: 'plot.txt', expected a name that ends in .eps"),
        (
            ["--plot", "nowhere/plot.png"],
            "argument --plot: 'nowhere/plot.png', cannot be written: No such file",
        ),
        (["--out", "file"], "argument --out: 'file', cannot be written: File exists"),
        (["--out", "file/folder"], "argument --out: 'file/folder', cannot be written: Not a directory"),
        (["--out", ""], "argument --out: '', expected a file or a folder"),
        (["--seconds", "0"], "argument --seconds: '0', expected a number above 0"),
        (["--seconds", "nan"], "argument --seconds: 'nan', expected"),
        (["--device", "gpu"], "argument --device: invalid choice: 'gpu'"),
        (["--q"], "unrecognized arguments: --q"),
    ],
)
def test_command_refuses_with_one_line_before_any_work(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as stop:
        run.main([*arguments, "--quick", "--device", "cpu"])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert complaint in err and err.count("\n") == 1
    assert os.listdir() == ["file"]


@pytest.mark.parametrize(
    ("mode", "is_on"),
    [
        (deterministic, torch.are_deterministic_algorithms_enabled),
        (
            lambda contender: on_tier(contender, "sm80"),
            lambda: os.environ.get("MONOIDREDUCE_CUDA_TIER") == "sm80",
        ),
    ],
    ids=("deterministic", "on_tier"),
)
def test_a_contender_in_a_mode_has_it_forward_and_backward_and_nothing_else_has(
    mode: Callable[[harness.Contender], harness.Contender], is_on: Callable[[], bool]
) -> None:
    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            modes.append(is_on())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            modes.append(is_on())
            return grad

    modes: list[bool] = []
    x = torch.randn(3, requires_grad=True)
    y = mode(lambda x: Seen.apply(2 * x)[None])(Seen.apply(x))
    assert modes == [False, True]
    y.sum().backward()
    assert modes == [False, True, True, False]
    assert not is_on()


def test_kernels_of_folds_are_reported_beside_the_built_in() -> None:
    row = {
        "op": "siglip",
        "parameters": {"N": 1, "V": 2, "D": 3},
        "milliseconds": {
            "forward": {"own": 2.0, "built-in": 1.0},
            "backward": {"own": 1.0, "built-in": 0.92},
        },
        "target": 0.92,
    }
    *_, line = report.fold_kernels_table([row]).splitlines()
    assert [*map(str.strip, line.split("|"))][1:5] == [
        "siglip",
        "N 1, V 2, D 3",
        "2, 1: 0.50, 0.92 **MISSED**",
        "1, 0.92: 0.92, 0.92 met",
    ]


def test_the_interpreter_is_timed_beside_a_compiled_monoid() -> None:
    (row,) = interpreter.measure_interpreter(CPU, quick=True)
    assert row["width"] == 64 and all(t > 0 for times in row["milliseconds"].values() for t in times)
    row = {"width": 64, "milliseconds": {"forward": [1.0, 1.25], "backward": [1.0, 1.0]}, "target": 0.85}
    *_, line = report.interpreter_table([row]).splitlines()
    assert [*map(str.strip, line.split("|"))][1:4] == [
        "64",
        "1.00, 1.25: 0.80, 0.85 **MISSED**",
        "1.00, 1.00: 1.00, 0.85 met",
    ]


def test_a_later_run_of_a_device_replaces_what_it_measures_again() -> None:
    def row(length: int, contenders: str) -> dict[str, Any]:
        total = {"milliseconds": dict.fromkeys(contenders.split(), 1.0)}
        return {
            "op": "attention",
            "dtype": "bfloat16",
            "parameters": {"L": length},
            "phases": {"total": total},
        }

    def document(device: str, rows: list[dict[str, Any]], overhead: list[str]) -> dict[str, Any]:
        return {
            "environment": {"device": device},
            "speed": rows,
            "accuracy": [{"op": "attention", "length": row["parameters"]["L"]} for row in rows],
            "memory": [],
            "overhead": overhead,
        }

    runs = [
        document("A", [row(64, "ours"), row(128, "ours"), row(256, "ours other")], ["old"]),
        document("B", [row(128, "ours")], ["of B"]),
        document("A", [row(128, "ours other"), row(256, "ours")], ["new"]),
    ]
    runs[0]["derivatives"] = [{"op": "attention"}, {"op": "mlp"}]
    runs[2]["derivatives"] = [{"op": "mlp"}]
    first, other, second = report.without_what_was_measured_again(runs)
    assert [row["parameters"] for row in first["speed"]] == [{"L": 64}, {"L": 256}]  # the second lacks one
    assert first["accuracy"] == [] and first["overhead"] == []
    assert first["derivatives"] == [{"op": "attention"}]
    assert other == runs[1] and second == runs[2]


def test_a_run_without_a_library_does_not_hide_it(committed: list[dict[str, Any]]) -> None:
    headline = publish.HEADLINES[0]
    row = publish.find(committed, headline)
    fastest = publish.others(row)[0].name
    later = copy.deepcopy(row)
    for of in (*(phase["milliseconds"] for phase in later["phases"].values()), later["step_peak_bytes"]):
        del of[fastest]
    newest = {"environment": {"device": publish.DEVICE}, "speed": [later]}
    assert publish.find([newest, *committed], headline) == row
