"""Trains a small byte-level language model with layers of PyTorch and of MonoidReduce, and compares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from monoidreduce import _C
from monoidreduce._command_line import (
    Parser,
    add_device,
    check_environment,
    device_of,
    plot_file,
    some_path,
    whole_number,
)

from .data import check_length, read_text
from .memory import can_measure
from .model import ModelSize
from .report import list_paths, save_plot, table
from .sweep import Sweep, sweep_loss, sweep_mlp
from .train import Settings, train_both


@dataclass(frozen=True)
class Scale:
    """What a device gets: the model, its training, and the sizes at which memory is measured."""

    size: ModelSize
    batch: int
    steps: int
    learning_rate: float
    autocast: torch.dtype | None
    lengths: list[int]
    vocabularies: list[int]


SCALES = {
    # Two cores need about two minutes. In float32 the two loss curves differ by rounding alone.
    "cpu": Scale(
        size=ModelSize(layers=4, dim=128, heads=4, hidden=512, length=256),
        batch=8,
        steps=200,
        learning_rate=2e-3,
        autocast=None,
        lengths=[2048, 4096, 8192, 16384, 32768],
        vocabularies=[256, 1024, 4096, 16384, 65536],
    ),
    # bfloat16 products over float32 weights: how models are trained on GPUs, and what matrix units are for.
    # Large enough that a step of either model takes the GPU longer than the host, whose time is Python's.
    "cuda": Scale(
        size=ModelSize(layers=6, dim=1024, heads=16, hidden=4096, length=1024),
        batch=32,
        steps=200,
        learning_rate=1e-3,
        autocast=torch.bfloat16,
        lengths=[8192, 16384, 32768, 65536, 131072],
        vocabularies=[256, 1024, 4096, 16384, 65536],
    ),
}


def run(scale: Scale, device: torch.device, text: Tensor, plot: Path, seed: int) -> None:
    """Trains both models, measures both layers, prints the table and saves the plot."""
    where = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{torch.get_num_threads()} CPU threads"
    )
    print(f"{text.numel() / 1e6:.1f} MB of text, {scale.steps} steps of {scale.batch} sequences, on {where}")
    print(scale.size)
    settings = Settings(
        scale.size, scale.batch, scale.steps, scale.learning_rate, scale.autocast, device, seed
    )
    before = Counter(_C.path_counts())
    runs = train_both(text, settings)
    paths = Counter(_C.path_counts()) - before
    sweeps: list[Sweep] = []
    if can_measure(device):
        print("measuring the memory of both layers, each in a process of its own")
        dtype, tokens = scale.autocast or torch.float32, scale.batch * scale.size.length
        sweeps.append(sweep_mlp(scale.size, scale.lengths, device, dtype))
        sweeps.append(sweep_loss(scale.size, tokens, scale.vocabularies, device, dtype))
    else:
        print("memory is not measured: on the CPU this needs /proc/self/clear_refs, which Linux has")
    print("\n" + table(runs, sweeps))
    print("\n" + list_paths(paths))
    try:
        save_plot(plot, runs, sweeps)
        print(f"plot: {plot}")
    except ImportError:
        print("no plot: matplotlib is not installed")


def main(argv: list[str]) -> int:
    """Runs the demo and returns the exit status; `argv` is what follows `python -m monoidreduce demo`."""
    parser = Parser(prog="python -m monoidreduce demo", description=__doc__)
    parser.add_argument(
        "--path", type=some_path, help="text file or folder to train on (default: Python's standard library)"
    )
    add_device(parser)
    parser.add_argument("--steps", type=whole_number(1, 10**9), help="training steps of each model")
    parser.add_argument(
        "--seed",
        type=whole_number(-(2**63), 2**64 - 1),  # as torch.manual_seed
        default=0,
        help="decides weights and batches (default: 0)",
    )
    parser.add_argument(
        "--plot", type=plot_file, metavar="FILE", default="monoidreduce_demo.png", help="default: %(default)s"
    )
    options = parser.parse_args(argv)
    check_environment(parser)
    device = device_of(parser, options.device)
    scale = SCALES[device.type]
    if options.steps is not None:
        scale = replace(scale, steps=options.steps)
    try:
        text = read_text(options.path)
        check_length(text, scale.size.length)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    run(scale, device, text, options.plot, options.seed)
    return 0
