"""The demo: its data, its models, its measure of memory, and the command from end to end at a tiny scale."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import demo
from monoidreduce.demo import layers
from monoidreduce.demo import train as training
from monoidreduce.demo.data import batches, read_text
from monoidreduce.demo.layers import LayerScale
from monoidreduce.demo.memory import Problem, can_measure, measure
from monoidreduce.demo.model import ModelSize
from monoidreduce.demo.report import save_plot, table
from monoidreduce.demo.sweep import Sweep, sweep_loss, sweep_mlp
from monoidreduce.demo.train import Progress, Run, Settings, train_both

pytestmark = pytest.mark.release  # a test of tools

CPU = torch.device("cpu")
TINY = ModelSize(layers=2, dim=16, heads=2, hidden=24, length=12)
MIB = 1 << 20

needs_proc = pytest.mark.skipif(not can_measure(CPU), reason="needs Linux's /proc/self/clear_refs")


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    """At these sizes threads only wait for each other, for long where tests run side by side."""
    torch.set_num_threads(1)


SCALE = LayerScale(TINY, 2, 3, 1e-3, None, vocabularies=[16], lengths=[16])


# Data


def test_text_is_the_bytes_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xc3\xa9 = 1\n")
    assert bytes(read_text(file).tolist()) == b"\xc3\xa9 = 1\n"


def test_text_of_a_folder_is_sorted_and_without_binaries(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "binary").write_bytes(b"\0\1")
    (tmp_path / "empty").write_bytes(b"")
    assert bytes(read_text(tmp_path).tolist()) == b"first\nsecond"


def test_text_is_the_standard_library_by_default() -> None:
    text = bytes(read_text(None).tolist())
    assert len(text) > 1e6
    assert Path(argparse.__file__).read_bytes() in text


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_no_text_is_an_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=rf"path.*{name}"):
        read_text(tmp_path / name)


def test_batches_hold_the_next_byte_and_depend_on_the_seed() -> None:
    text = torch.arange(50, dtype=torch.uint8)
    drawn = list(batches(text, steps=4, batch=3, length=7, seed=1))
    assert len(drawn) == 4
    for tokens, target in drawn:
        assert tokens.shape == target.shape == (3, 7)
        torch.testing.assert_close(target, tokens + 1)
    again, other = batches(text, 4, 3, 7, seed=1), batches(text, 4, 3, 7, seed=2)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(drawn, again, strict=True))
    assert not all(torch.equal(a[0], b[0]) for a, b in zip(drawn, other, strict=True))


def test_batches_reach_both_ends_of_the_text() -> None:
    text = torch.arange(9, dtype=torch.uint8)
    seen = torch.cat([torch.cat(pair, 1) for pair in batches(text, 50, 4, 7, seed=0)])
    assert seen.min() == 0
    assert seen.max() == 8


def test_text_shorter_than_a_sequence_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"7 bytes.*7"):
        next(batches(torch.zeros(7, dtype=torch.uint8), 1, 1, 7, 0))


# Models


def test_the_models_are_one_function_of_one_seed() -> None:
    tokens, target = torch.randint(256, (3, TINY.length)), torch.randint(256, (3, TINY.length))
    results: dict[str, list[Tensor]] = {}
    for backend, model in SCALE.models(seed=0).items():
        loss = model.double()(tokens, target)
        results[backend] = [loss, *torch.autograd.grad(loss, list(model.parameters()))]
    torch.testing.assert_close(results["monoidreduce"], results["torch"], rtol=1e-9, atol=1e-11)


def test_both_models_learn_alike() -> None:
    text = torch.frombuffer(bytearray(b"abcdefgh" * 20), dtype=torch.uint8)
    settings = Settings(TINY.length, batch=3, steps=40, learning_rate=1e-2, autocast=None, device=CPU, seed=5)
    runs = train_both(text, SCALE.models(seed=5), settings)
    ours, theirs = (torch.tensor(runs[name].losses) for name in ("monoidreduce", "torch"))
    assert ours[-1] < 1 < 5 < ours[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert all(run.step_seconds > 0 for run in runs.values())


def test_progress_without_tqdm_is_ten_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(training, "tqdm", None)
    progress = Progress(25)
    for _ in range(25):
        progress.step("torch 1.000")
    progress.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == "training: step 25 of 25, loss torch 1.000"


# Memory


class Scratch(torch.autograd.Function):
    """The identity, with passing needs of so many MiB."""

    @staticmethod
    def forward(ctx, x: Tensor, forward: int, backward: int) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.backward_mib = backward
        result = x.clone()
        torch.ones(forward * MIB, dtype=torch.uint8)
        return result

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[no-untyped-def]
        result = grad.clone()
        torch.ones(ctx.backward_mib * MIB, dtype=torch.uint8)
        return result, None, None


def scratch(size: int, forward: int, backward: int) -> Problem:
    x = torch.randn(size * MIB // 4, requires_grad=True)
    call: Callable[..., Tensor] = Scratch.apply
    return Problem(lambda: call(x, forward, backward), (x,), torch.ones_like(x))


@needs_proc
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="its allocator keeps freed memory")
def test_memory_is_what_is_needed_beyond_input_output_and_gradient() -> None:
    sizes = [
        {"size": 16, "forward": 1, "backward": 1},
        {"size": 16, "forward": 24, "backward": 1},
        {"size": 64, "forward": 1, "backward": 40},
        {"size": 1, "forward": 8, "backward": 8},
    ]
    growth = measure(f"{__name__}:scratch", {"size": 1, "forward": 1, "backward": 1}, sizes)
    assert [size / MIB for size in growth] == pytest.approx([1, 24, 40, 8], abs=0.75)


class Lends(torch.autograd.Function):
    """The identity, whose forward pass holds memory that becomes the gradient."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.gradient = torch.ones_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.copy_(grad)


def lends(size: int) -> Problem:
    x = torch.randn(size * MIB // 4, requires_grad=True)
    call: Callable[..., Tensor] = Lends.apply
    return Problem(lambda: call(x), (x,), torch.ones_like(x))


@needs_proc
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="its allocator keeps freed memory")
def test_memory_that_becomes_gradients_counts_in_the_forward_pass() -> None:
    """Beyond output and gradients the whole step needs nothing, its forward pass the future gradient."""
    (growth,) = measure(f"{__name__}:lends", {"size": 1}, [{"size": 64}])
    assert growth / MIB == pytest.approx(64, abs=2)


class Adds(torch.autograd.Function):
    """The gradient of x is memory that was there before; the backward pass needs 24 MiB beside it."""

    @staticmethod
    def forward(ctx, x: Tensor, sums: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.sums = sums
        return x.sum()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        torch.ones(24 * MIB // 4)
        return ctx.sums, None


def adds(size: int) -> Problem:
    x, sums = torch.randn(size * MIB // 4, requires_grad=True), torch.ones(size * MIB // 4)
    call: Callable[..., Tensor] = Adds.apply
    return Problem(lambda: call(x, sums), (x,), torch.ones(()), sums=sums.nbytes)


@needs_proc
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="its allocator keeps freed memory")
def test_gradients_in_memory_that_was_there_are_not_subtracted() -> None:
    (growth,) = measure(f"{__name__}:adds", {"size": 1}, [{"size": 64}])
    assert growth / MIB == pytest.approx(24, abs=2)


@needs_proc
def test_memory_is_measured_where_a_folder_has_the_name_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a clone, next to an installed package."""
    (tmp_path / "monoidreduce").mkdir()
    (tmp_path / "monoidreduce" / "__init__.py").write_text("raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    once = {"size": 4, "forward": 1, "backward": 1}
    assert len(measure(f"{__name__}:scratch", once, [once])) == 1


@needs_proc
def test_layers_that_store_nothing_need_less_as_they_grow() -> None:
    size = ModelSize(layers=1, dim=16, heads=1, hidden=256, length=1)
    mlp = sweep_mlp(size, [16384], CPU, torch.float32)
    loss = sweep_loss(size, 2048, [4096], CPU, torch.float32)
    assert mlp.growth["torch"][0] > 2 * 16384 * 256 * 4  # two hidden matrices
    assert loss.growth["torch"][0] > 2 * 2048 * 4096 * 4  # logits and their gradient
    for sweep in (mlp, loss):
        assert sweep.growth["monoidreduce"][0] < sweep.growth["torch"][0] / 4


# Report and command

RUNS = {"torch": Run([3.0, 2.0], 0.5), "monoidreduce": Run([3.0, 2.25], 0.25)}
SWEEPS = [
    Sweep("loss", "vocabulary", [8, 16, 32], {"torch": [MIB, 2 * MIB, 4 * MIB], "monoidreduce": [0, 0, MIB]})
]


def test_table_compares_curves_times_and_memory() -> None:
    lines = [line.split() for line in table(RUNS, SWEEPS).splitlines()]
    assert lines[0] == ["torch", "monoidreduce"]
    assert ["loss,", "last", "step", "2.0000", "2.2500"] in lines
    assert ["time", "per", "step,", "median", "500.0", "ms", "250.0", "ms"] in lines
    assert ["memory", "of", "the", "loss,", "vocabulary", "32", "4.0", "MiB", "1.0", "MiB"] in lines
    assert ["largest", "difference", "of", "the", "two", "loss", "curves:", "0.25"] in lines


@pytest.mark.parametrize("suffix", [".PNG", ".svg"])
def test_plot_is_written(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot{suffix}"
    save_plot(file, RUNS, SWEEPS)
    assert file.stat().st_size > 1000


def test_command_trains_measures_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(layers.SCALES, "cpu", SCALE)
    plot = tmp_path / "plot.png"
    argv = ["--device", "cpu", "--path", __file__, "--steps", "2", "--seed", "3", "--plot", str(plot)]
    assert demo.main(argv) == 0
    said = capsys.readouterr().out
    assert "2 steps of 2 sequences" in said
    assert "largest difference of the two loss curves" in said
    calls = {line.split()[0]: line.split()[1] for line in said.splitlines() if "_forward/" in line}
    isa = mr._C.cpu_isa_of(torch.empty(0))
    assert calls == {
        f"attention_forward/cpu/{isa}/float32": str(2 * TINY.layers),
        f"cross_entropy_forward/cpu/{isa}/float32": "2",
        f"mlp_forward/cpu/{isa}/float32": str(2 * TINY.layers),
    }
    assert ("memory of the MLP, sequence length 16" in said) == can_measure(CPU)
    assert plot.exists() == ("no plot" not in said)
