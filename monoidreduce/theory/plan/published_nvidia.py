"""Runs that NVIDIA publishes with the releases of NeMo and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator

from monoidreduce.theory.plan.models import MODELS, gpt
from monoidreduce.theory.plan.planner import OVERLAP, Dispatch, Precision
from monoidreduce.theory.plan.runs import Run, planned

__all__ = ["nvidia"]

_NEMO = "github.com/NVIDIA/NeMo, docs/source/performance/performance_summary.md, 24.07"
_BRIDGE = "github.com/NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, "
_RELEASES = ("25.09", "25.11", "26.02", "26.04.01")


def nvidia() -> Iterator[Run]:
    """Runs by release, dense models first."""
    found = [*_dense(), *_experts()]
    for source in (_NEMO, *(_BRIDGE + release for release in _RELEASES)):
        yield from (run for run in found if run.source == source)


def _dense() -> Iterator[Run]:
    five, twenty, gpt3 = gpt(24, 4096, 32), gpt(44, 6144, 48), MODELS["gpt3-175b"]
    llama2, llama3 = (
        {size: MODELS[f"llama{version}-{size}"] for size in sizes}
        for version, sizes in ((2, ("7b", "13b", "70b")), (3, ("8b", "70b", "405b")))
    )
    # release of Megatron-Bridge, model, hardware; batch, microbatch, sequence; stages, replicas, context and
    # tp; chunks; ZeRO, where 3 is FSDP; tokens/s of a GPU; fitted
    rows = (
        ("", "GPT-3 5B", five, "h100", 2048, 4, 2048, (1, 64, 1, 1), 1, 1, 22521, False),
        ("", "GPT-3 20B", twenty, "h100", 256, 2, 2048, (1, 32, 1, 2), 1, 1, 5851, True),
        ("", "GPT-3 175B", gpt3, "h100", 256, 1, 2048, (8, 4, 1, 4), 6, 1, 726, False),
        ("", "GPT-3 175B", gpt3, "h100", 2048, 2, 2048, (8, 16, 1, 4), 6, 1, 782, True),
        ("", "Llama 2 7B", llama2["7b"], "h100", 128, 1, 4096, (1, 8, 1, 1), 1, 1, 16847, True),
        ("", "Llama 2 13B", llama2["13b"], "h100", 128, 1, 4096, (4, 4, 1, 1), 10, 1, 8646, False),
        ("", "Llama 2 70B", llama2["70b"], "h100", 128, 1, 4096, (4, 4, 1, 4), 20, 1, 1707, False),
        ("", "Llama 3 8B", llama3["8b"], "h100", 128, 1, 8192, (1, 4, 2, 1), 1, 1, 12036, False),
        ("", "Llama 3 70B", llama3["70b"], "h100", 128, 1, 8192, (4, 2, 2, 4), 5, 1, 1533, True),
        ("25.11", "Llama 3 8B", llama3["8b"], "h100", 128, 1, 8192, (1, 8, 1, 1), 1, 3, 14451, False),
        ("25.11", "Llama 3 70B", llama3["70b"], "h100", 128, 1, 8192, (8, 2, 1, 4), 5, 1, 1602, False),
        ("25.11", "Llama 3 405B", llama3["405b"], "h100", 512, 1, 8192, (8, 8, 2, 8), 8, 1, 292, False),
        ("25.11", "Llama 3 8B", llama3["8b"], "b200", 128, 2, 8192, (1, 8, 1, 1), 1, 1, 30624, False),
        ("25.11", "Llama 3 405B", llama3["405b"], "b200", 64, 1, 8192, (8, 2, 2, 4), 8, 1, 661, False),
        ("26.02", "Llama 3 70B", llama3["70b"], "h100", 256, 1, 8192, (8, 2, 1, 4), 5, 1, 1621, False),
        ("26.02", "Llama 3 405B", llama3["405b"], "h100", 1536, 1, 8192, (8, 8, 2, 8), 8, 1, 311, False),
        ("26.04.01", "Llama 3 70B", llama3["70b"], "h100", 256, 1, 8192, (8, 2, 1, 4), 5, 1, 1664, False),
        ("26.04.01", "Llama 3 405B", llama3["405b"], "h100", 1536, 1, 8192, (8, 8, 2, 8), 8, 1, 328, False),
    )
    for release, name, model, hardware, batch, micro, length, sizes, chunks, zero, rate, fitted in rows:
        names = "pipeline", "fsdp" if zero == 3 else "dp", "context", "tp"
        plan = planned(
            model,
            hardware,
            batch * length,
            length,
            dict(zip(names, sizes, strict=True)),
            microbatch=micro,
            chunks=min(chunks, model.layers // sizes[0]),
            zero=zero % 3,
            precision=Precision(float8=True),
            overlap=(*OVERLAP, "tp"),
            fused_loss=bool(release),
        )
        gpus = plan.mesh.chips
        yield Run(
            f"{name}, {gpus} {hardware.upper()}, float8{', ' * bool(release)}{release}",
            _BRIDGE + release if release else _NEMO,
            plan,
            batch * length / (gpus * rate),
            fitted=fitted,
            assumed="collectives of tp overlap",
        )


# Sizes by the release's recipes, scripts/performance: the page has those of 25.09, at the speed that 26.02
# has for these.
_RECIPE = "experts' GPUs, microbatch and chunks of 25.11 as in its recipes, where the page has others"


def _experts() -> Iterator[Run]:
    names = {
        "DeepSeek V3": "deepseek-v3",
        "GPT-OSS 120B": "gpt-oss-120b",
        "Qwen3 30B": "qwen3-30b-a3b",
        "Qwen3 235B": "qwen3-235b-a22b",
    }
    # release, model, hardware; GPUs, batch and microbatch; stages, chunks, tp and experts' chips; whether
    # exchanges overlap and whether DeepEP or HybridEP makes them; tokens/s of a GPU
    rows = (
        ("25.09", "DeepSeek V3", "h100", (1024, 8192, 1), (8, 4, 2, 64), True, True, 1297),
        ("25.11", "DeepSeek V3", "b200", (256, 2048, 1), (16, 1, 1, 8), False, False, 2139),
        ("25.11", "GPT-OSS 120B", "b200", (64, 512, 4), (1, 1, 1, 64), False, False, 8213),
        ("25.11", "Qwen3 30B", "b200", (8, 512, 1), (1, 1, 1, 8), False, False, 9299),
        ("25.11", "Qwen3 235B", "b200", (64, 1024, 1), (8, 4, 1, 8), True, False, 3269),
        ("25.11", "GPT-OSS 120B", "h100", (64, 512, 1), (4, 1, 1, 8), False, False, 5630),
        ("25.11", "Qwen3 30B", "h100", (16, 512, 1), (2, 12, 1, 8), True, False, 5275),
        ("25.11", "Qwen3 235B", "h100", (256, 2048, 1), (8, 4, 2, 32), True, False, 1575),
        ("26.02", "DeepSeek V3", "b200", (256, 4096, 1), (16, 1, 1, 8), False, False, 2689),
        ("26.02", "GPT-OSS 120B", "b200", (64, 1280, 4), (1, 1, 1, 64), False, False, 8047),
        ("26.02", "Qwen3 30B", "b200", (8, 512, 1), (1, 1, 1, 8), False, False, 9691),
        ("26.02", "Qwen3 235B", "b200", (256, 8192, 1), (8, 1, 1, 8), False, False, 3805),
        ("26.02", "GPT-OSS 120B", "h100", (64, 1280, 1), (4, 1, 1, 8), False, False, 5993),
        ("26.02", "Qwen3 30B", "h100", (16, 1024, 1), (2, 12, 1, 8), True, True, 5113),
        ("26.02", "Qwen3 235B", "h100", (256, 8192, 1), (8, 4, 2, 32), True, False, 1633),
        ("26.04.01", "DeepSeek V3", "b200", (256, 4096, 1), (8, 2, 1, 32), True, True, 3328),
        ("26.04.01", "GPT-OSS 120B", "b200", (64, 1280, 4), (1, 1, 1, 8), False, False, 13568),
        ("26.04.01", "Qwen3 30B", "b200", (8, 512, 4), (1, 1, 1, 8), False, True, 27136),
        ("26.04.01", "Qwen3 235B", "b200", (256, 8192, 1), (8, 1, 1, 8), False, False, 3776),
        ("26.04.01", "GPT-OSS 120B", "h100", (64, 1280, 1), (4, 1, 1, 8), False, False, 5824),
        ("26.04.01", "Qwen3 30B", "h100", (16, 1024, 1), (1, 1, 1, 16), False, True, 8960),
        ("26.04.01", "Qwen3 235B", "h100", (256, 8192, 1), (8, 4, 2, 32), True, False, 1712),
    )
    for release, name, hardware, (gpus, batch, micro), sizes, overlaps, by_node, rate in rows:
        stages, chunks, tp, experts = sizes
        experts //= tp  # the GPUs of a tp group have different experts; here they share each expert's widths
        eight = not name.startswith("GPT")
        plan = planned(
            MODELS[names[name]],
            hardware,
            batch * 4096,
            4096,
            dict(pipeline=stages, dp=gpus // (stages * tp * experts), expert=experts, tp=tp),
            microbatch=micro,
            chunks=chunks,
            zero=1,
            precision=Precision(
                float8=eight, gradients=2, sent=2, optimizer=8 if name.startswith("DeepSeek") else 12
            ),
            dispatch=Dispatch(by_node=by_node, grouped=False),
            overlap=(*OVERLAP, "expert") if overlaps else OVERLAP,
            fused_loss=True,
        )
        yield Run(
            f"{name}, {gpus} {hardware.upper()}, {'float8' if eight else 'bfloat16'}, {release}",
            _BRIDGE + release,
            plan,
            batch * 4096 / (gpus * rate),
            fitted=release == "26.02",
            assumed=_RECIPE,
        )
