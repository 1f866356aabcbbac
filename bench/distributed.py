"""The operators over several ranks, compared with one.

    torchrun --nproc-per-node 2 bench/distributed.py [--quick] [--seconds S] [--out DIR]

The efficiency of W ranks is T1 / (W TW). T1 is the time of the whole problem on the first rank, while the
others wait. TW is the time of the slowest rank, in calls that begin together. Rows also have the predictions
of `monoidreduce.plan.over_ranks`, on GPUs with known links; peers over the same ranks (sharded_peers.py); and
the memory of each contender beyond inputs, outputs and gradients.

Each contender takes all its steps in succession, as in training: a GPU near its power limit is faster after
pauses. When contenders took turns, T1 was shorter, and most efficiencies were lower.

If peers are faster than ours, a profile of a step of each shows where the time goes.

The environment variable NCCL_P2P_NVL_CHUNKSIZE is the size of NCCL's chunks over NVLink. Unless it is set, it
is set to 4 MiB here, for all contenders. NCCL's default is 512 KiB, with which exchanges take longer.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # The repository comes last in sys.path, so that its folder monoidreduce/ does not hide an installed
    # package.
    here = Path(__file__).resolve().parent
    sys.path = [*(path for path in sys.path if path != str(here)), str(here.parent)]

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, schedule

import monoidreduce as mr
from bench.attention_varlen import lengths_of
from bench.harness import AGREEMENT, PHASES, ROUNDS, Stopwatch, differences, dtype_name, run_once, summary
from bench.machine import environment
from bench.overhead import measure_over_ranks
from bench.report import host_table, in_words, ranks_table
from bench.sharded_peers import (
    ATTENTION,
    CROSS_ENTROPY,
    DISTILLATION,
    LIGER,
    MLP,
    Peer,
    in_torch_parallel,
)
from monoidreduce import plan
from monoidreduce._command_line import (
    Parser,
    add_device,
    device_of,
    exit_with,
    positive_number,
    replacing,
    some_path,
)
from monoidreduce.demo.memory import Problem, peak_growth
from monoidreduce.hardware import find_gpu
from monoidreduce.theory.costs.sizes import OPERATORS

CHUNKS = "NCCL_P2P_NVL_CHUNKSIZE"
SECONDS = 3.0  # for each case on one rank, over ranks, and by each peer
ALONE, OVER_RANKS = "alone", "over ranks"


@dataclass(frozen=True)
class Case:
    """An operator at one size.

    inputs: makes all inputs; the first `leaves` of them get gradients.
    axes: the axis that is sharded, for each input and then for the output; None if replicated.
    options: options of `mr.Ranks` in the call over ranks.
    target: the least efficiency of two GPUs in `phase`.
    phase: "total" (forward and backward pass) or "forward".
    peers: name -> peer over the same ranks.
    """

    op: str
    dtype: torch.dtype
    parameters: dict[str, Any]
    call: Callable[..., Tensor]
    inputs: Callable[[], tuple[Tensor, ...]]
    leaves: int
    axes: tuple[int | None, ...]
    options: dict[str, Any]
    target: float | None = None
    phase: str = "total"
    peers: Mapping[str, Peer] = field(default_factory=dict)

    def problems(self, group: Any) -> tuple[dict[str, Problem], Callable[[list[Tensor]], list[Tensor]]]:
        """The problems of one rank, over ranks and of peers.

        Also a function from results of the whole problem to this rank's parts.
        """
        *axes, of_output = self.axes
        layout = self.options.get("layout", "contiguous")

        def part(t: Tensor, axis: int | None) -> Tensor:
            return t if axis is None else mr.distributed.shard(t, axis, group, layout).detach()

        torch.manual_seed(0)
        inputs = self.inputs()
        parts = tuple(part(t, axis) for t, axis in zip(inputs, axes, strict=True))
        whole, over_ranks = inputs[: self.leaves], parts[: self.leaves]
        for leaf in (*whole, *over_ranks):
            leaf.requires_grad_()
        with torch.no_grad():
            grad = torch.randn_like(self.call(*inputs))
        calls = {OVER_RANKS: partial(self.call, ranks=mr.Ranks(group, **self.options))}
        calls |= {name: peer(group) for name, peer in self.peers.items()}
        own = part(grad, of_output)
        problems = {ALONE: Problem(lambda: self.call(*inputs), whole, grad)}
        problems |= {name: Problem(partial(call, *parts), over_ranks, own) for name, call in calls.items()}
        return problems, lambda found: [
            part(t, axis) for t, axis in zip(found, (of_output, *axes), strict=False)
        ]

    def __str__(self) -> str:
        return f"{self.op} {in_words(self.parameters)} {dtype_name(self.dtype)}"


def cases(device: torch.device, quick: bool) -> list[Case]:
    on_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if on_gpu else torch.float32

    def drawn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
        return tuple(torch.randn(shape, device=device).to(dtype) for shape in shapes)

    def of_head(
        op: str, call: Callable[..., Tensor], sizes: dict[str, Any], target: float, **others: Any
    ) -> Case:
        N, V, D = (sizes[name] for name in "NVD")

        def inputs() -> tuple[Tensor, ...]:
            x, weight = drawn((N, D), (V, D))
            return x, weight * D**-0.5, torch.randint(V, (N,), device=device)

        axes = (None, 0, None, None)
        return Case(op, dtype, sizes, call, inputs, 2, axes, {}, target, **others)

    def cross_entropy(**sizes: Any) -> Case:
        peers = CROSS_ENTROPY | (LIGER if on_gpu and find_spec("liger_kernel") else {})
        return of_head("cross_entropy", mr.linear_cross_entropy, sizes, 0.93, peers=peers)

    def keeping(**sizes: Any) -> Case:
        """A case with a workspace so large that the forward pass saves all local gradients."""
        call = partial(mr.linear_cross_entropy, workspace=1 << 40)
        return of_head("cross_entropy", call, sizes | {"kept": True}, 0.96)

    def log_probs(**sizes: Any) -> Case:
        def call(*tensors: Tensor, **options: Any) -> Tensor:
            return mr.linear_log_probs(*tensors, **options).log_probs

        return of_head("log_probs", call, sizes, 0.96, phase="forward")

    def distillation(N: int, V: int, D: int, E: int) -> Case:
        def inputs() -> tuple[Tensor, ...]:
            x, weight, teacher_x, teacher_weight = drawn((N, D), (V, D), (N, E), (V, E))
            return x, weight * D**-0.5, teacher_x, teacher_weight * E**-0.5

        axes = (None, 0, None, 0, None)
        sizes = {"N": N, "V": V, "D": D, "E": E}
        return Case(
            "distillation",
            dtype,
            sizes,
            mr.linear_distillation,
            inputs,
            2,
            axes,
            {},
            0.93,
            peers=DISTILLATION,
        )

    def attention(L: int, H: int, Hkv: int, d: int, method: str, layout: str, target: float) -> Case:
        def inputs() -> tuple[Tensor, ...]:
            return drawn((1, H, L, d), (1, Hkv, L, d), (1, Hkv, L, d))

        sizes = {"L": L, "H": H, "Hkv": Hkv, "d": d, "method": method, "layout": layout}
        options = {"method": method, "layout": layout}
        call = partial(mr.attention, causal=True)
        peers = ATTENTION if layout == "zigzag" and on_gpu else {}
        return Case("attention", dtype, sizes, call, inputs, 3, (2,) * 4, options, target, peers=peers)

    def packed(T: int, sequences: int, H: int, Hkv: int, d: int, method: str, layout: str) -> Case:
        def inputs() -> tuple[Tensor, ...]:
            ends = torch.tensor([0, *lengths_of(T, sequences, equal=False)], device=device).cumsum(0)
            return *drawn((T, H, d), (T, Hkv, d), (T, Hkv, d)), ends

        sizes = {"T": T, "sequences": sequences, "H": H, "Hkv": Hkv, "d": d}
        options = {"method": method, "layout": layout}
        call = partial(mr.attention_varlen, causal=True)
        axes = (0, 0, 0, None, 0)
        return Case("attention_varlen", dtype, sizes | options, call, inputs, 3, axes, options)

    def mlp(B: int, K: int, D: int) -> Case:
        def inputs() -> tuple[Tensor, ...]:
            x, w1, w2 = drawn((B, D), (K, D), (D, K))
            return x, w1 * D**-0.5, w2 * K**-0.5

        options = {"sequence_parallel": True}
        sizes, axes = {"B": B, "K": K, "D": D}, (0, 0, 1, 0)
        return Case("mlp", dtype, sizes, mr.mlp, inputs, 3, axes, options, 0.87, peers=MLP)

    if quick:
        return [
            cross_entropy(N=64, V=128, D=16),
            keeping(N=64, V=128, D=16),
            log_probs(N=64, V=128, D=16),
            distillation(64, 128, 16, 24),
            attention(64, 4, 2, 16, "ulysses", "contiguous", 0.93),
            attention(64, 4, 2, 16, "all_gather", "zigzag", 0.91),
            packed(64, 5, 4, 2, 16, "ulysses", "contiguous"),
            packed(64, 5, 4, 2, 16, "all_gather", "zigzag"),
            mlp(64, 64, 16),
        ]
    long, head = 2048, {"N": 1024, "V": 16384, "D": 256}
    if on_gpu:
        long, head = 32768, {"N": 8192, "V": 128256, "D": 4096}
    return [
        cross_entropy(**head),
        keeping(**head),
        log_probs(**head),
        distillation(4096, 128256, 2048, 4096) if on_gpu else distillation(1024, 8192, 256, 256),
        attention(long, 32, 8, 128, "ulysses", "contiguous", 0.93),
        attention(long, 32, 8, 128, "all_gather", "zigzag", 0.91),
        packed(long, 32, 32, 8, 128, "ulysses", "contiguous"),
        packed(long, 32, 32, 8, 128, "all_gather", "zigzag"),
        mlp(16384, 16384, 4096) if on_gpu else mlp(2048, 4096, 256),
    ]


# Parts of the names of matrix-product kernels: cuBLAS's, then ours.
PRODUCTS = ("gemm", "nvjet", "cutlass", *(f"{of}Epilogue" for of in ("Store", "Scatter", "Add", "Float")))


def kind_of(kernel: str) -> str:
    """The kind of a kernel, by its name."""
    if "nccl" in kernel:
        return "collectives"
    if any(part in kernel for part in PRODUCTS):
        return "matrix products"
    if "contraction_kernel" in kernel:
        return "local gradients" if "Gradient" in kernel else "folds"
    return "others"


def profiled(problem: Problem, group: Any) -> dict[str, dict[str, float]]:
    """Kind -> milliseconds and number of a step's kernels on this GPU.

    The second of two steps is profiled. All ranks begin it together, as a collective waits for the last rank.
    """
    with profile(activities=[ProfilerActivity.CUDA], schedule=schedule(wait=1, warmup=1, active=1)) as seen:
        for _ in range(2):
            dist.barrier(group)
            torch.cuda.synchronize()
            seen.step()
            torch.autograd.grad(problem.forward(), problem.inputs, problem.grad_output)
            torch.cuda.synchronize()
    found: dict[str, dict[str, float]] = {}
    for event in seen.key_averages():
        of_kind = found.setdefault(kind_of(event.key), {"milliseconds": 0.0, "kernels": 0})
        of_kind["milliseconds"] += event.self_device_time_total / 1e3
        of_kind["kernels"] += event.count
    return found


def time_case(case: Case, group: Any, device: torch.device, seconds: float) -> dict[str, Any]:
    """Time a case on one rank, over ranks and by peers, for about `seconds` each."""
    ranks, watch = dist.get_world_size(group), Stopwatch(device)
    problems, parts_of = case.problems(group)
    expected = parts_of(run_once(problems[ALONE], watch)[1])

    def largest(values: list[float]) -> list[float]:
        """The maximum over ranks of each value."""
        found = torch.tensor(values, device=device, dtype=torch.float32)
        dist.all_reduce(found, dist.ReduceOp.MAX, group)
        return found.tolist()

    def slowest(name: str) -> list[float]:
        """Milliseconds of the phases on the slowest rank of those that take part."""
        takes_part = name != ALONE or dist.get_rank(group) == 0
        dist.barrier(group)
        return largest(run_once(problems[name], watch)[0] if takes_part else [0.0] * 3)

    laps, difference, memory = {}, {}, {}
    with in_torch_parallel(group):
        for name, problem in problems.items():
            if name != ALONE:
                difference[name] = max(largest(differences(run_once(problem, watch)[1], expected)))
                if not difference[name] <= AGREEMENT[case.dtype]:
                    raise RuntimeError(
                        f"{case}, {name}: results differ from one device by {difference[name]:.1e}"
                    )
                if device.type == "cuda":
                    memory[name] = largest([peak_growth(problem) / 2**20])[0]
            once = slowest(name)[-1] / 1e3
            rounds = max(ROUNDS[0], min(ROUNDS[1], round(seconds / once)))
            laps[name] = [slowest(name) for _ in range(rounds)]
    # All ranks have the slowest rank's times, and so choose the same contenders.
    of_steps = {name: statistics.median(lap[-1] for lap in found) for name, found in laps.items()}
    faster = [name for name in problems if name != ALONE and of_steps[name] < of_steps[OVER_RANKS]]
    seen = {}
    if faster and device.type == "cuda":
        with in_torch_parallel(group):
            seen = {name: profiled(problems[name], group) for name in (OVER_RANKS, *faster)}
    phases = {}
    for i, phase in enumerate(PHASES):
        milliseconds = {name: summary([lap[i] for lap in found]) for name, found in laps.items()}
        alone, over = (milliseconds[name]["median"] for name in (ALONE, OVER_RANKS))
        phases[phase] = {"milliseconds": milliseconds, "efficiency": alone / (ranks * over)}
    return {
        "op": case.op,
        "dtype": dtype_name(case.dtype),
        "parameters": case.parameters,
        "ranks": ranks,
        "rounds": {name: len(found) for name, found in laps.items()},
        "difference": difference,
        "memory_mib": memory,
        "phases": phases,
        "profile": seen,
        "target": case.target,
        "target_phase": case.phase,
    }


def predicted(row: dict[str, Any], device: str) -> dict[str, float] | None:
    """The planner's milliseconds for a row's forward and backward pass, on one rank and over ranks.

    None on devices with unknown links, and for packed sequences, where time depends on their lengths.

    device: result of torch.cuda.get_device_name.
    """
    gpu = find_gpu(device)
    if gpu is None or gpu.within is None or row["op"] not in OPERATORS:
        return None
    operator, sizes = OPERATORS[row["op"]], dict(row["parameters"])
    split, layout = sizes.pop("method", "columns"), sizes.pop("layout", "zigzag")
    if operator == "attention":
        sizes |= {"B": 1, "causal": True}
    if operator == "mlp":
        sizes["d"] = sizes.pop("D")
    with mr.workspace(1 << 40 if sizes.pop("kept", False) else mr.get_workspace()):
        found = plan.over_ranks(
            operator,
            sizes,
            row["ranks"],
            gpu,
            split=split,
            sequence_parallel=operator == "mlp",
            layout=layout,
            dtype=getattr(torch, row["dtype"]),
        )
    return {ALONE: 1e3 * found.alone, OVER_RANKS: 1e3 * found.seconds}


def measure(group: Any, device: torch.device, quick: bool, seconds: float) -> Iterator[dict[str, Any]]:
    """A row for each case. All ranks of the group call it."""
    for case in cases(device, quick):
        row = time_case(case, group, device, 0.0 if quick else seconds)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        row["predicted"] = predicted(row, name)
        if dist.get_rank(group) == 0:
            print(f"{case}: efficiency {row['phases']['total']['efficiency']:.2f}", file=sys.stderr)
        yield row


def main(argv: list[str]) -> int:
    """Measure all cases, print their table and, with --out, write a JSON file named after the device."""
    parser = Parser(
        prog="torchrun bench/distributed.py", description="The operators over several ranks beside one."
    )
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="small sizes, few rounds: does it run")
    parser.add_argument(
        "--seconds", type=positive_number, default=SECONDS, help="for each case (%(default)s)"
    )
    parser.add_argument("--out", type=some_path, metavar="DIR", help="folder for the results")
    options = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("no rank: start it by torchrun --nproc-per-node 2")
    device = device_of(parser, options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    os.environ.setdefault(CHUNKS, str(4 << 20))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    group, first = dist.group.WORLD, dist.get_rank() == 0
    document: dict[str, Any] = {}
    if first:
        command = " ".join(
            [
                f"{CHUNKS}={os.environ[CHUNKS]}",
                "torchrun",
                f"--nproc-per-node {dist.get_world_size()}",
                "bench/distributed.py",
                *argv,
            ]
        )
        document = {"environment": environment(device, command), "backend": dist.get_backend()}
        document |= {"speed": [], "memory": [], "overhead": [], "ranks": [], "host": []}

    def add(kind: str, rows: list[dict[str, Any]]) -> None:
        """Add rows to the document, and write it."""
        document[kind] += rows
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            name = re.sub(r"[^a-z0-9]+", "_", document["environment"]["device"].lower()).strip("_")
            with replacing(options.out / f"{name}_{device.type}_ranks.json") as whole:
                whole.write_text(json.dumps(document, indent=1) + "\n")

    host = measure_over_ranks(device, group)
    if first:
        add("host", host)
    for row in measure(group, device, options.quick, options.seconds):
        if first:
            add("ranks", [row])
    if first:
        print(ranks_table(document["ranks"]), host_table(document["host"]), sep="\n\n")
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    exit_with(main, sys.argv[1:])
