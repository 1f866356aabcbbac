"""Trains a small byte-level language model with and without MonoidReduce, and compares. Or shows a fold."""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import replace
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
from .memory import UNMEASURED, can_measure
from .report import list_paths, name_of, save_plot, table, tell_plot
from .scale import Scale
from .sweep import Sweep
from .train import Settings, train_both


def run(scale: Scale, device: torch.device, text: Tensor, plot: Path, seed: int) -> None:
    """Trains both models, measures their memory, prints the table and saves the plot."""
    size = f"{text.numel() / 1e6:.1f} MB of text"
    print(f"{size}, {scale.steps} steps of {scale.batch} sequences, on {name_of(device)}")
    print(scale.title())
    settings = Settings(
        scale.size.length, scale.batch, scale.steps, scale.learning_rate, scale.autocast, device, seed
    )
    before = Counter(_C.path_counts())
    runs = train_both(text, scale.models(seed), settings)
    paths = Counter(_C.path_counts()) - before
    sweeps: list[Sweep] = []
    if can_measure(device):
        print("measuring the memory of both, each in a process of its own")
        sweeps = scale.sweeps(device)
    else:
        print(UNMEASURED)
    print("\n" + table(runs, sweeps))
    print("\n" + list_paths(paths))
    tell_plot(plot, lambda: save_plot(plot, runs, sweeps))


def main(argv: list[str]) -> int:
    """Runs the demo and returns the exit status; `argv` is what follows `python -m monoidreduce demo`."""
    parser = Parser(prog="python -m monoidreduce demo", description=__doc__)
    parser.add_argument(
        "model",
        nargs="?",
        help="transformers: a Llama with `apply` and without it; fold: trains nothing, but follows a "
        "function of one logit to its kernels, and times it (default: a model of torch's layers)",
    )
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
    if options.model not in (None, "transformers", "fold"):
        parser.error(f"argument model: {options.model!r}, expected transformers, fold or nothing")
    for name in ("path", "steps"):
        if options.model == "fold" and getattr(options, name) is not None:
            parser.error(f"argument --{name}: expected only without fold, which trains nothing")
    check_environment(parser)
    device = device_of(parser, options.device)
    try:
        module = importlib.import_module(f".{options.model or 'layers'}", __name__)
    except ImportError as error:
        parser.error(f"argument model: {error}: pip install 'monoidreduce[transformers]'")
    if options.model == "fold":
        module.run(module.SCALES[device.type], device, options.plot, options.seed)
        return 0
    scale: Scale = module.SCALES[device.type]
    if options.steps is not None:
        scale = replace(scale, steps=options.steps)
    try:
        text = read_text(options.path)
        check_length(text, scale.size.length)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    run(scale, device, text, options.plot, options.seed)
    return 0
