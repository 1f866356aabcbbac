"""Published training runs, as the planner sees them; `runs.py` compares predictions with them.

Rows with `fitted` are those that the constants of `rates.py` were fitted to: about every third, of each kind
of device. A figure that its source leaves out is in `assumed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from monoidreduce.theory.plan.models import MODELS, gpt
from monoidreduce.theory.plan.planner import OVERLAP, Dispatch, Plan, Precision
from monoidreduce.theory.plan.published_nvidia import nvidia
from monoidreduce.theory.plan.runs import GIB, Run, planned
from monoidreduce.theory.plan.transformer import Model

__all__ = ["RUNS"]


def _full_attention_flops(model: Model, tokens: float, sequence: float) -> float:
    """6 N + 12 L H Q T per token, of all scores: the FLOPs of PaLM's MFU (its appendix B)."""
    return model.gemm_flops(tokens) + 2 * model.attention_flops(tokens, sequence)


# Megatron-LM before sequence parallelism: all of a layer runs again, scores are stored, gradients of
# replicas are sent after the last backward pass.
_MEGATRON = dict(
    recompute="full", sequence_parallel=False, stored_scores=True, dropout=True, overlap=("pipeline",)
)


def _narayanan() -> Iterator[Run]:
    source = "Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473, Table 1"
    rows = (
        # parameters, heads, width, layers, tp, stages, GPUs, batch, TFLOP/s of a GPU
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142),
        ("18B", 48, 6144, 40, 8, 1, 256, 1024, 135),
        ("39B", 64, 8192, 48, 8, 2, 512, 1536, 138),
        ("76B", 80, 10240, 60, 8, 4, 1024, 1792, 140),
        ("146B", 96, 12288, 80, 8, 8, 1536, 2304, 148),
        ("310B", 128, 16384, 96, 8, 16, 1920, 2160, 155),
        ("530B", 128, 20480, 105, 8, 35, 2520, 2520, 163),
        ("1T", 160, 25600, 128, 8, 64, 3072, 3072, 163),
    )
    for number, (name, heads, width, layers, tp, stages, gpus, batch, rate) in enumerate(rows):
        model = gpt(layers, width, heads)
        # Equation 3, which counts what runs again.
        flops = 96.0 * batch * 2048 * layers * width**2
        flops *= 1 + 2048 / (6 * width) + 51200 / (16 * layers * width)
        per_stage = -(-layers // stages)
        chunks = 1 if stages == 1 else next(n for n in (3, 2, 1) if per_stage % n == 0)
        replicas = gpus // tp // stages
        most = 8 if stages == 1 else 1
        plan = planned(
            model,
            "a100-80gb",
            2048 * batch,
            2048,
            dict(pipeline=stages, dp=replicas, tp=tp),
            microbatch=min(most, batch // replicas),
            chunks=chunks,
            **_MEGATRON,
        )
        yield Run(
            f"GPT {name}, {gpus} A100",
            source,
            plan,
            flops / (gpus * rate * 1e12),
            fitted=number % 2 == 1,
            assumed="8 sequences a microbatch without a pipeline, else 1; 2 or 3 chunks a stage",
        )


def _narayanan_175b() -> Iterator[Run]:
    source = "Efficient Large-Scale Language Model Training on GPU Clusters, arXiv 2104.04473, Table 2"
    model, batch = MODELS["gpt3-175b"], 1536
    flops = 96.0 * batch * 2048 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (16 * 96 * 12288))
    for gpus, rate in ((384, 153), (768, 149), (1536, 141)):
        axes = dict(pipeline=12, dp=gpus // 96, tp=8)
        plan = planned(model, "a100-80gb", 2048 * batch, 2048, axes, microbatch=1, **_MEGATRON)
        name = f"GPT 175B, {gpus} A100"
        yield Run(
            name, source, plan, flops / (gpus * rate * 1e12), assumed="8 x 12 of its 96-way parallelism"
        )


def _korthikanti() -> Iterator[Run]:
    source = "Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, Tables 3 and 5"
    rows = (
        ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
        ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
    )
    for number, (name, heads, width, layers, stages, chunks, batch, micro, full, selective) in enumerate(
        rows
    ):
        for what, seconds in (("full", full), ("selective", selective)):
            options: dict[str, Any] = dict(_MEGATRON)
            if what == "selective":
                options |= dict(recompute="attention", sequence_parallel=True)
            plan = planned(
                gpt(layers, width, heads),
                "a100-80gb",
                2048 * batch,
                2048,
                dict(pipeline=stages, tp=8),
                microbatch=micro,
                chunks=chunks,
                **options,
            )
            yield Run(
                f"GPT {name}, {8 * stages} A100, {what} recompute",
                source,
                plan,
                seconds,
                fitted=number % 2 == 1,
            )


def _mt_nlg() -> Iterator[Run]:
    source = "Using DeepSpeed and Megatron to Train Megatron-Turing NLG 530B, arXiv 2201.11990, section 2.3"
    for replicas, seconds in ((8, 60.1), (10, 50.2), (12, 44.4)):
        plan = planned(
            MODELS["mt-nlg-530b"],
            "a100-80gb",
            1920 * 2048,
            2048,
            dict(dp=replicas, pipeline=35, tp=8),
            microbatch=1,
            **_MEGATRON,
        )
        yield Run(f"MT-NLG 530B, {280 * replicas} A100", source, plan, seconds)


def _llm_foundry() -> Iterator[Run]:
    source = "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md"
    models = {
        "125m": gpt(12, 768, 12, 50368),
        "760m": gpt(24, 1536, 12, 50368),
        "1b": gpt(24, 2048, 16, 50368),
        "3b": gpt(32, 2560, 20, 50368),
        "7b": gpt(32, 4096, 32, 50368),
        "13b": gpt(40, 5120, 40, 50368),
        "30b": gpt(48, 7168, 56, 50368),
        "70b": gpt(80, 8192, 64, 50368),
    }
    rows = (
        # model, hardware, GPUs, sequence, microbatch, batch, checkpoints, tokens/s of a GPU, fitted
        ("125m", "a100-80gb", 8, 2048, 40, 640, False, 142830, False),
        ("760m", "a100-80gb", 8, 2048, 24, 384, False, 32434, False),
        ("1b", "a100-80gb", 8, 2048, 14, 448, False, 20513, False),
        ("3b", "a100-80gb", 8, 2048, 10, 160, False, 10811, False),
        ("7b", "a100-80gb", 8, 2048, 6, 96, False, 4641, True),
        ("7b", "a100-80gb", 8, 8192, 8, 128, True, 3206, True),
        ("7b", "a100-80gb", 8, 32768, 2, 32, True, 1672, False),
        ("7b", "a100-80gb", 8, 65536, 1, 16, True, 1013, False),
        ("13b", "a100-80gb", 8, 2048, 2, 48, False, 2262, False),
        ("13b", "a100-80gb", 8, 4096, 10, 240, True, 2060, True),
        ("30b", "a100-80gb", 8, 2048, 3, 504, True, 916, False),
        ("30b", "a100-80gb", 8, 4096, 1, 168, True, 814, False),
        ("30b", "a100-80gb", 8, 8192, 1, 168, True, 574, False),
        ("70b", "a100-80gb", 64, 2048, 8, 2048, True, 410, False),
        ("70b", "a100-80gb", 32, 2048, 2, 1024, True, 373, False),
        ("13b", "a100", 128, 2048, 16, 2048, True, 1972, False),
        ("30b", "a100", 128, 2048, 6, 768, True, 865, True),
        ("7b", "a100", 64, 2048, 18, 1152, True, 3665, False),
        ("70b", "a100", 64, 2048, 2, 128, True, 276, False),
        ("70b", "a100", 128, 2048, 4, 512, True, 376, False),
        ("760m", "h100", 8, 2048, 24, 384, False, 63147, False),
        ("1b", "h100", 8, 2048, 14, 112, False, 45455, False),
        ("3b", "h100", 64, 2048, 6, 1152, False, 22525, False),
        ("3b", "h100", 8, 4096, 5, 240, False, 20964, False),
        ("7b", "h100", 8, 2048, 6, 48, False, 10643, True),
        ("7b", "h100", 8, 4096, 16, 256, True, 8611, False),
        ("7b", "h100", 8, 8192, 8, 128, True, 6935, False),
        ("7b", "h100", 8, 32768, 2, 32, True, 3318, False),
        ("7b", "h100", 8, 65536, 1, 16, True, 1956, False),
        ("13b", "h100", 8, 4096, 10, 240, True, 4717, True),
        ("13b", "h100", 64, 2048, 2, 128, False, 4800, False),
        ("30b", "h100", 32, 2048, 14, 1344, True, 2308, True),
        ("30b", "h100", 8, 2048, 3, 504, True, 2002, False),
        ("30b", "h100", 8, 8192, 1, 168, True, 1384, False),
        ("70b", "h100", 32, 2048, 2, 1024, True, 882, False),
        ("70b", "h100", 64, 2048, 8, 2048, True, 1039, False),
    )
    # Likewise, with products in 8 bits: model, sequence, microbatch, batch, checkpoints, tokens/s of a GPU
    in_8_bits = (
        ("3b", 32768, 3, 144, True, 5856),
        ("3b", 8192, 3, 144, False, 19146),
        ("3b", 2048, 10, 480, False, 30586),
        ("3b", 512, 40, 1920, False, 36527),
        ("1b", 32768, 1, 32, False, 12580),
        ("1b", 8192, 2, 64, False, 32010),
        ("1b", 512, 56, 1792, False, 70315),
    )
    both = [(row, "") for row in rows]
    both += [
        ((name, "h100", 8, sequence, micro, batch, again, rate, False), ", float8")
        for name, sequence, micro, batch, again, rate in in_8_bits
    ]
    for (name, hardware, gpus, sequence, micro, batch, again, rate, fitted), eight in both:
        tokens = batch * sequence
        plan = planned(
            models[name],
            hardware,
            tokens,
            sequence,
            dict(fsdp=gpus),
            microbatch=micro,
            recompute="full" if again else "none",
            precision=Precision(float8=bool(eight)),
            network="roce-200" if hardware.startswith("a100") else "infiniband-ndr",
        )
        yield Run(
            f"MPT {name}, {gpus} {hardware.upper()}, {sequence} tokens{eight}",
            source,
            plan,
            tokens / (gpus * rate),
            fitted=fitted,
            assumed="" if hardware.startswith("a100") else "400 Gb/s of InfiniBand a GPU",
        )


def _megascale() -> Iterator[Run]:
    source = "MegaScale, arXiv 2402.15627, section 6 and Table 2: Megatron-LM, its baseline"
    model = gpt(96, 12288, 128, 64000)
    rows = (
        (768, 256, 40.0),
        (768, 512, 21.2),
        (768, 768, 15.2),
        (768, 1024, 11.9),
        (6144, 3072, 29.02),
        (6144, 6144, 14.78),
        (6144, 8192, 12.24),
        (6144, 12288, 8.57),
    )
    for batch, gpus, seconds in rows:
        plan = planned(
            model,
            "a100-80gb",
            2048 * batch,
            2048,
            dict(pipeline=8, dp=gpus // 64, tp=8),
            microbatch=1,
            chunks=6,
            zero=1,
            recompute="attention",
            dropout=True,
            stored_scores=True,
            overlap=("pipeline",),
        )
        yield Run(
            f"GPT 175B, {gpus} A100, batch {batch}",
            source,
            plan,
            seconds,
            assumed="one sequence a microbatch; the network, 200 Gb/s a GPU; selective recompute",
        )


def _llama3() -> Iterator[Run]:
    source = "The Llama 3 Herd of Models, arXiv 2407.21783, Table 4"
    model, tokens = MODELS["llama3-405b"], 2**24
    for replicas, context, length, rate in ((64, 1, 8192, 430), (128, 1, 8192, 400), (8, 16, 131072, 380)):
        gpus = 128 * replicas * context
        plan = planned(
            model,
            "h100",
            tokens,
            length,
            dict(dp=replicas, pipeline=16, context=context, tp=8),
            zero=1,
            chunks=4,
            network="roce-400",
            microbatch=1,
        )
        flops = _full_attention_flops(model, tokens, length)
        yield Run(
            f"Llama 3 405B, {gpus} H100, {length} tokens",
            source,
            plan,
            flops / (gpus * rate * 1e12),
            assumed="4 chunks a stage; FLOPs as in PaLM",
        )


def _torchtitan() -> Iterator[Run]:
    source = "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md"
    eight = Precision(float8=True)
    small, middle, large = (MODELS[f"llama3-{size}"] for size in ("8b", "70b", "405b"))
    rows: list[tuple[str, Plan, float, float, bool]] = []
    for gpus, half, quarter in ((8, (6667, 77.0), (8532, 76.8)), (128, (6514, 62.0), (8380, 61.8))):
        for what, (rate, memory) in (("bfloat16", half), ("float8", quarter)):
            plan = planned(
                small,
                "h100-hbm2e",
                2 * gpus * 8192,
                8192,
                dict(fsdp=gpus),
                recompute="alternate",
                precision=eight if what == "float8" else Precision(),
            )
            rows.append((f"Llama 3 8B, {gpus} H100, {what}", plan, rate, memory, gpus == 8))
    for context, speed, memory in ((1, 3890, 83.9), (2, 2540, 84.2), (4, 1071, 84.0), (8, 548, 84.5)):
        fsdp, sequence = 8 // context, 32768 * context
        plan = planned(
            small,
            "h100-hbm2e",
            fsdp * sequence,
            sequence,
            dict(fsdp=fsdp, context=context),
            recompute="full",
            precision=eight,
            zero=0,
        )
        rows.append((f"Llama 3 8B, context {context} of {sequence}", plan, speed, memory, context == 1))
    for overlap, rate, memory in (((), 829, 71.9), (("tp",), 876, 67.6)):
        plan = planned(
            middle,
            "h100-hbm2e",
            512 * 8192,
            8192,
            dict(fsdp=32, tp=8),
            recompute="full",
            precision=eight,
            overlap=OVERLAP + overlap,
        )
        rows.append(
            (f"Llama 3 70B, 256 H100, float8{', async tp' if overlap else ''}", plan, rate, memory, False)
        )
    for chunks, rate, memory in ((1, 100, 82.5), (2, 128, 72.7)):
        plan = planned(
            large,
            "h100-hbm2e",
            256 * 8192,
            8192,
            dict(pipeline=8, fsdp=8, tp=8),
            recompute="full",
            precision=eight,
            overlap=(*OVERLAP, "tp"),
            chunks=chunks,
            microbatch=4,
        )
        rows.append((f"Llama 3 405B, 512 H100, {chunks} chunk(s)", plan, rate, memory, False))
    for name, plan, each, memory, fitted in rows:
        seconds = plan.batch.tokens / (plan.mesh.chips * each)
        yield Run(name, source, plan, seconds, memory * GIB, fitted)
    source = "github.com/pytorch/torchtitan, benchmarks/llama3_8b_h200_2025-06_torchtitan.md"
    for gpus, speed, held in ((32, 10938, 47.96), (64, 10753, 46.97)):
        plan = planned(
            small,
            "h200",
            2 * gpus * 8192,
            8192,
            dict(fsdp=gpus),
            recompute="alternate",
            precision=eight,
            fused_loss=True,
        )
        yield Run(
            f"Llama 3 8B, {gpus} H200, float8",
            source,
            plan,
            plan.batch.tokens / (gpus * speed),
            held * GIB,
            assumed="the loss is compiled",
        )


def _deepseek() -> Iterator[Run]:
    plan = planned(
        MODELS["deepseek-v3"],
        "h800",
        15360 * 4096,
        4096,
        dict(dp=2, pipeline=16, expert=64),
        zero=1,
        schedule="dualpipe",
        precision=Precision(float8=True, optimizer=8),
        dispatch=Dispatch(bytes=1),
        overlap=(*OVERLAP, "expert"),
        microbatch=1,
    )
    hours = 180e3 / 1e12  # of a GPU, for a token
    yield Run(
        "DeepSeek V3, 2048 H800, float8",
        "DeepSeek-V3, arXiv 2412.19437, section 1 and 3.2",
        plan,
        15360 * 4096 * hours * 3600 / 2048,
        assumed="one sequence a microbatch",
    )


def _palm() -> Iterator[Run]:
    model, tokens = MODELS["palm-540b"], 2048 * 2048
    flops = _full_attention_flops(model, tokens, 2048)
    plan = planned(
        model,
        "v4",
        tokens,
        2048,
        dict(dp=2, fsdp=256, tp=12),
        links={"dp": "dcn", "fsdp": 2, "tp": 1},
        recompute="full",
        overlap=(*OVERLAP, "tp"),
        stored_scores=True,
    )
    yield Run(
        "PaLM 540B, 6144 TPU v4",
        "PaLM, arXiv 2204.02311, sections 4 and 4.1",
        plan,
        flops / (6144 * 0.462 * 2.75e14),
        assumed="collectives overlap",
    )


def _maxtext() -> Iterator[Run]:
    source = "github.com/AI-Hypercomputer/maxtext, MaxText/configs/v4"
    rows = (
        # model, layers, width, heads, chips of a slice, sequences of a chip; slices, TFLOP/s of a chip
        ("22B", 48, 6144, 24, 64, 13, ((1, 156), (2, 152), (4, 149), (8, 146))),
        ("52B", 32, 12288, 32, 192, 7, ((1, 154), (2, 162))),
    )
    for name, layers, width, heads, chips, sequences, found in rows:
        model = gpt(layers, width, heads, 32000)
        for slices, rate in found:
            tokens = sequences * chips * slices * 2048
            plan = planned(
                model,
                "v4",
                tokens,
                2048,
                dict(dp=slices, fsdp=chips),
                links={"dp": "dcn", "fsdp": 3},
                recompute="full",
            )
            yield Run(
                f"{name}, {chips * slices} TPU v4",
                source,
                plan,
                _full_attention_flops(model, tokens, 2048) / (chips * slices * rate * 1e12),
                fitted=name == "22B" and slices in (1, 4),
                assumed="sequences of 2048 tokens",
            )


RUNS: tuple[Run, ...] = (
    *_narayanan(),
    *_narayanan_175b(),
    *_korthikanti(),
    *_mt_nlg(),
    *_llm_foundry(),
    *_megascale(),
    *_llama3(),
    *_torchtitan(),
    *nvidia(),
    *_deepseek(),
    *_palm(),
    *_maxtext(),
)
