"""Races: in the deterministic mode a call has the same bits in every run, also beside other work on the GPU.

A kernel that reads shared memory after another warp has freed it is right in most runs. Work on another
stream delays warps, so that they drift apart, and a second run of the same call shows other bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import results, upstreams
from folds import fold_inputs, moved, with_gradients
from mods import Mod, alibi, document, sliding_window
from specimens import (
    TENSOR_CORE_SPECIMENS,
    Specimen,
    attention_inputs,
    cross_entropy_inputs,
    distillation_inputs,
    logsumexp_inputs,
    mlp_inputs,
    name_of,
    normal,
    starts,
    varlen_inputs,
)
from tolerance import content
from torch import Tensor

import monoidreduce as mr

RUNS = 16
Step = Callable[[], list[Tensor]]  # one forward and backward pass: the results and the gradients

# Sequences of random lengths: tiles that few rows keep, beside whole ones, let warps drift apart.
LENGTHS = (746, 713, 728, 10, 199, 276, 184, 885, 336, 1000)
WIDTHS = (64, 128, 192, 256)
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30), "softcap": 20.0},
}


def _attention() -> list[Specimen]:
    found = []
    for width in WIDTHS:
        heads = {"heads": 8, "kv_heads": 4, "width": width, "value_width": width}
        for mask, options in MASKS.items():
            options = {**options, "return_lse": True}
            packed = {"queries": LENGTHS, "keys": None, "behind": 5, **heads}
            found += [
                Specimen(f"varlen_{width}_{mask}", "attention_varlen", varlen_inputs, packed, options),
                Specimen(
                    f"attention_{width}_{mask}",
                    "attention",
                    attention_inputs,
                    {"m": 1100, "n": 1300, **heads},
                    options,
                ),
            ]
    return found


# Calls with many tiles, and one small call for each kind of tensor-core kernel.
SPECIMENS = (
    *_attention(),
    *(replace(specimen, name=f"{specimen.name}_small") for specimen in TENSOR_CORE_SPECIMENS),
    Specimen(
        "attention_bias",
        "attention",
        attention_inputs,
        {"heads": 8, "m": 1100, "n": 1300, "width": 128, "value_width": 128, "bias": (1, 8, 1100, 1300)},
    ),
    Specimen(
        "attention_few_rows",
        "attention",
        attention_inputs,
        {"heads": 16, "m": 3, "n": 9000, "width": 128, "value_width": 128},
        {"causal": True},
    ),
    Specimen(
        "attention_512",
        "attention",
        attention_inputs,
        {"m": 500, "n": 700, "width": 512, "value_width": 512},
        {"causal": True},
    ),
    *(
        Specimen(
            f"cross_entropy_{workspace >> 20}_MiB",
            "linear_cross_entropy",
            cross_entropy_inputs,
            {"rows": 2000, "classes": 9000, "width": 512},
            {"workspace": workspace},
        )
        for workspace in (8 << 20, 128 << 20)
    ),
    *(
        Specimen(
            f"distillation_{loss}",
            "linear_distillation",
            distillation_inputs,
            {"rows": 2000, "classes": 5000, "width": 256, "teacher_width": 384, "mask": True},
            {"loss": loss, "teacher_grad": loss != "jsd", "workspace": 16 << 20},
        )
        for loss in ("cross_entropy", "reverse_kl", "jsd")
    ),
    Specimen(
        "log_probs",
        "linear_log_probs",
        cross_entropy_inputs,
        {"rows": 2000, "classes": 9000, "width": 512},
        {"entropy": True, "workspace": 16 << 20},
    ),
    *(
        Specimen(
            f"mlp_{width}",
            "mlp",
            mlp_inputs,
            {"rows": 3000, "width": width, "hidden": 2000, "outputs": width},
        )
        for width in (64, 128, 256, 512)
    ),
    Specimen(
        "mlp_gated",
        "mlp",
        mlp_inputs,
        {"rows": 2000, "width": 512, "hidden": 1500, "outputs": 512, "gate": True},
        {"activation": "silu"},
    ),
    *(
        Specimen(
            f"logsumexp_{width}",
            "logsumexp_matmul",
            logsumexp_inputs,
            {"rows": 2000, "columns": 5000, "width": width},
            {"scale": 0.1},
        )
        for width in (2, 64, 512)
    ),
)


def step_of(specimen: Specimen, dtype: torch.dtype, gpu: torch.device) -> Step:
    inputs = specimen.inputs(dtype, gpu)
    grads = upstreams(specimen, inputs)
    return lambda: list(results(specimen, inputs, grads).values())


def disturbance(gpu: torch.device) -> Callable[[], None]:
    """Queues matrix products on another stream, beside which blocks of a kernel start at odd moments."""
    stream = torch.cuda.Stream()
    left, right = torch.randn(2, 2048, 2048, device=gpu, dtype=torch.bfloat16).unbind()
    product = torch.empty_like(left)

    def disturb() -> None:
        ordered = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(False)  # cuBLAS would ask for a workspace of fixed size
        with torch.cuda.stream(stream):
            for rows in (2048, 130, 1024, 300):
                torch.mm(left[:rows], right, out=product[:rows])
        torch.use_deterministic_algorithms(ordered)

    stream.wait_stream(torch.cuda.current_stream())
    return disturb


def assert_no_race(step: Step, gpu: torch.device, runs: int = RUNS) -> None:
    """Runs the step alone, and then often beside other work: all results have the same bits."""
    first = [content(t) for t in step()]
    torch.cuda.synchronize()
    disturb = disturbance(gpu)
    different = torch.zeros(len(first), dtype=torch.int64, device=gpu)  # runs with other bits, by result
    for _ in range(runs):
        disturb()
        again = [content(t) for t in step()]
        different += torch.stack([(a != b).any() for a, b in zip(again, first, strict=True)])
    counts = different.tolist()
    assert counts == [0] * len(first), f"of {runs} runs, those with other bits, by result: {counts}"


@pytest.mark.tiers("simt", "sm80", "sm90")
@pytest.mark.parametrize("specimen", SPECIMENS, ids=name_of)
def test_operators(specimen: Specimen, gpu: torch.device, tier: str, deterministic: None) -> None:
    assert_no_race(step_of(specimen, torch.bfloat16, gpu), gpu)


@pytest.mark.parametrize(
    "name", ("attention_64_causal", "attention_256_causal", "varlen_256_causal", "mlp_128")
)
def test_tf32(name: str, gpu: torch.device, deterministic: None, tf32: None) -> None:
    specimen = next(specimen for specimen in SPECIMENS if specimen.name == name)
    assert_no_race(step_of(specimen, torch.float32, gpu), gpu)


@pytest.mark.tiers("sm80", "sm90")
@pytest.mark.parametrize("wanted", ((0,), (1, 2), (2,)), ids=("d_q", "d_k_and_d_v", "d_v"))
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("packed", (False, True), ids=("dense", "packed"))
def test_some_gradients(
    packed: bool, width: int, wanted: tuple[int, ...], gpu: torch.device, tier: str, deterministic: None
) -> None:
    """Gradients that are computed alone have kernels of their own."""
    total = sum(LENGTHS)
    shapes = ((total, 8, width), (total, 4, width)) if packed else ((2, 8, 1100, width), (2, 4, 1300, width))
    place: Any = {"dtype": torch.bfloat16, "device": gpu}
    leaves = [normal(*shapes[n > 0], **place).requires_grad_(n in wanted) for n in range(3)]
    grad = normal(*shapes[0], **place)

    def step() -> list[Tensor]:
        out = (
            mr.attention_varlen(*leaves, starts(LENGTHS, gpu), causal=True)
            if packed
            else mr.attention(*leaves, causal=True)
        )
        return list(torch.autograd.grad(out, [leaves[n] for n in wanted], grad))

    assert_no_race(step, gpu)


@pytest.mark.tiers("simt", "sm80", "sm90")
@pytest.mark.parametrize("mod", (alibi, document, sliding_window))
@pytest.mark.parametrize("blocks", (False, True), ids=("all", "blocks"))
@pytest.mark.parametrize("width", (64, 128, 256))
def test_functions_of_scores(
    width: int, blocks: bool, mod: Mod, gpu: torch.device, tier: str, deterministic: None
) -> None:
    B, H, L = 2, 4, 1100
    case = mod(B, H, L, L, dtype=torch.float32, device=gpu)
    place: Any = {"dtype": torch.bfloat16, "device": gpu}
    leaves = [normal(B, H, L, width, **place).requires_grad_() for _ in range(3)]
    grad = normal(B, H, L, width, **place)
    mask = case.mask_mod or (lambda b, h, i, j: (i + j) % 300 > 100)
    chosen: dict[str, Any] = {"mask_mod": case.mask_mod}
    if blocks:
        chosen = {"block_mask": mr.block_mask(mask, B, H, L, L, device=gpu)}

    def step() -> list[Tensor]:
        out = mr.attention(*leaves, score_mod=case.score_mod, **chosen)
        return [out.detach(), *torch.autograd.grad(out, [*leaves, *case.captured], grad)]

    assert_no_race(step, gpu)


@pytest.mark.tiers("simt", "sm80", "sm90")
@pytest.mark.parametrize("width", (64, 128, 256))
def test_functions_of_packed_scores(width: int, gpu: torch.device, tier: str, deterministic: None) -> None:
    slopes = torch.randn(4, device=gpu)
    place: Any = {"dtype": torch.bfloat16, "device": gpu}
    leaves = [normal(sum(LENGTHS), 4, width, **place).requires_grad_() for _ in range(3)]
    grad = normal(sum(LENGTHS), 4, width, **place)

    def step() -> list[Tensor]:
        out = mr.attention_varlen(
            *leaves,
            starts(LENGTHS, gpu),
            score_mod=lambda score, b, h, i, j: score + slopes[h] * (j - i),
            mask_mod=lambda b, h, i, j: i - j <= 300,
        )
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    assert_no_race(step, gpu)


@pytest.mark.tiers("simt", "sm80", "sm90")
@pytest.mark.parametrize("normalized", (False, True), ids=("sum", "mean"))
def test_attend(normalized: bool, gpu: torch.device, tier: str, deterministic: None) -> None:
    place: Any = {"dtype": torch.bfloat16, "device": gpu}
    leaves = [normal(2, 4, 1100, 128, **place).requires_grad_() for _ in range(3)]
    grad = normal(2, 4, 1100, 128, **place)

    def step() -> list[Tensor]:
        out = mr.attend(*leaves, weight=torch.sigmoid, normalized=normalized, causal=True)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    assert_no_race(step, gpu)


@pytest.mark.tiers("simt", "sm80", "sm90")
@pytest.mark.parametrize("width", (3, 200))
@pytest.mark.parametrize("name", ("token_stats", "reference_kl", "distances"))
def test_statistics(name: str, width: int, gpu: torch.device, tier: str, deterministic: None) -> None:
    fold, call = fold_inputs(name, (1500,), 2100, width, torch.bfloat16)
    call = {argument: moved(value, gpu) for argument, value in call.items()}
    assert_no_race(lambda: with_gradients(fold, call), gpu)


def test_the_test_sees_a_race(gpu: torch.device) -> None:
    """Sums in any order, as torch has them in its default mode, have other bits."""
    terms = torch.randn(1 << 20, device=gpu)
    bins = torch.randint(0, 100, terms.shape, device=gpu)
    with pytest.raises(AssertionError, match="those with other bits"):
        assert_no_race(lambda: [torch.zeros(100, device=gpu).index_add_(0, bins, terms)], gpu)
