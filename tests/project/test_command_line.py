"""The commands: what they refuse and how they end, and that files are written whole or not at all."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

import monoidreduce as mr
from monoidreduce.__main__ import main
from monoidreduce._command_line import (
    PLOT_FORMATS,
    is_clone,
    plot_file,
    positive_number,
    replacing,
    some_path,
    whole_number,
)
from monoidreduce.demo import report
from monoidreduce.demo.train import Run

PACKAGES = Path(mr.__file__).resolve().parent.parent
CLONE = Path(__file__).resolve().parents[2]


def start(folder: Path, *arguments: str, first: Path | None = None, **options: Any) -> subprocess.Popen[str]:
    """`python -m monoidreduce ...` in `folder`; modules in `first` come before all others of their names."""
    path = [str(place) for place in (first, PACKAGES, os.environ.get("PYTHONPATH")) if place]
    return subprocess.Popen(
        [sys.executable, "-m", "monoidreduce", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **options.pop("environment", {})},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"} | options,
    )


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


# Refusals

COST = ["cost", "--hardware", "h100"]
PLAN = ["plan", "--hardware", "v5p", "--model", "llama3-8b", "--batch", "1e6"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["train"], "argument command: invalid choice: 'train'"),
        (["--include"], "unrecognized arguments: --include"),
        (["info", "x"], "unrecognized arguments: x"),
        (["demo", "x"], "argument model: 'x', expected transformers, fold or nothing"),
        (["demo", "fold", "x"], "unrecognized arguments: x"),
        (["demo", "fold", "--steps", "5"], "argument --steps: expected only without fold"),
        (["demo", "fold", "--path", "short"], "argument --path: expected only without fold"),
        (["demo", "fold", "--seed", "x"], "argument --seed: 'x', expected a whole number from"),
        (["demo", "fold", "--plot", "plot.txt"], "argument --plot: 'plot.txt', expected a name"),
        (["demo", "transformers", "x"], "unrecognized arguments: x"),
        (["demo", "--step", "5"], "unrecognized arguments: --step"),
        (["demo", "--steps"], "argument --steps: expected one argument"),
        (["demo", "--steps", "0"], "argument --steps: '0', expected a whole number from 1 to 1000000000"),
        (["demo", "--steps", "-3"], "argument --steps: '-3', expected"),
        (["demo", "--steps", "1e3"], "argument --steps: '1e3', expected"),
        (["demo", "--steps", "9" * 5000], "argument --steps: '999"),
        (["demo", "--seed", str(2**64)], "argument --seed: '18446744073709551616', expected"),
        (["demo", "--seed", str(-(2**63) - 1)], "argument --seed: '-9223372036854775809', expected"),
        (["demo", "--device", "gpu"], "argument --device: invalid choice: 'gpu'"),
        (["demo", "--path", ""], "argument --path: '', expected a file or a folder"),
        (["demo", "--path", "no\nwhere"], "path: no file or folder at 'no\\nwhere'"),
        (["demo", "--path", "short"], "text: 4 bytes, expected more than one sequence of 256"),
        (
            ["demo", "--plot", "plot.txt"],
            "argument --plot: 'plot.txt', expected a name that ends in .eps, .jpeg",
        ),
        (["demo", "--plot", "folder.png"], "argument --plot: 'folder.png', cannot be written: not a file"),
        (
            ["demo", "--plot", "no/plot.png"],
            "argument --plot: 'no/plot.png', cannot be written: No such file",
        ),
        (["demo", "--plot", "short/plot.png"], "cannot be written: Not a directory"),
        (["demo", "--plot", "x" * 300 + ".png"], "cannot be written: File name too long"),
        (["plan"], "the following arguments are required: --hardware, --model, --batch"),
        (
            [*PLAN, "--mesh", "fsdp=8", "--hardware", "abacus"],
            "argument --hardware: invalid choice: 'abacus'",
        ),
        ([*PLAN, "--mesh", "fsdp=8", "--batch", "0"], "argument --batch: '0', expected a number above 0"),
        (
            [*PLAN, "--mesh", "ep=8"],
            "argument --mesh: 'ep=8', expected STRATEGY[=SIZE][:LINKS],... with each of dp,",
        ),
        (
            [*PLAN, "--mesh", "tp=2,tp=4"],
            "argument --mesh: 'tp=2,tp=4', expected STRATEGY[=SIZE][:LINKS],...",
        ),
        ([*PLAN, "--mesh", "tp=0"], "argument --mesh: '0', expected a whole number from 1 to 1000000"),
        ([*PLAN, "--mesh", "tp=2:x"], "argument --mesh: 'x', expected a number above 0"),
        ([*PLAN, "--mesh", "tp=2:4"], "links: expected at most the 3 of v5p in all, got 4"),
        ([*PLAN, "--mesh", "tp=3"], "tp: expected a divisor of heads 32, got 3"),
        (
            [*PLAN, "--mesh", "tp:1"],
            "argument --mesh: expected the sizes of all strategies, or none and --chips",
        ),
        (
            [*PLAN, "--mesh", "tp:1", "--chips", "7"],
            "mesh: expected strategies that share the chips (tp: expected a divisor of heads 32, got 7), got",
        ),
        (
            [*PLAN, "--mesh", "tp=2", "--overlap", "ep"],
            "argument --overlap: 'ep', expected some of dp, fsdp,",
        ),
        ([*PLAN, "--mesh", "tp=2", "--network", "wifi"], "argument --network: invalid choice: 'wifi'"),
        ([*PLAN, "--model", "llama9", "--mesh", "tp=2"], "model: expected one of llama3-8b,"),
        (
            [*PLAN, "--mesh", "tp=2", "--tokens", "-15e12"],
            "argument --tokens: '-15e12', expected a number above 0",
        ),
        ([*PLAN, "--mesh", "tp=2", "--chips", "8"], "argument --chips: expected only if --mesh has no sizes"),
        (["cost", "mlp", "B=8"], "the following arguments are required: --hardware"),
        ([*COST, "mlp", "B=8", "K=8"], "argument sizes: expected d too"),
        ([*COST, "mlp", "B=8", "K=8", "d=8", "x=8"], "argument sizes: x: expected one of B, K, d, gated"),
        (
            [*COST, "mlp", "B=8", "K=8", "d=8", "dtype=int8"],
            "argument sizes: dtype: expected one of bfloat16",
        ),
        (
            [*COST, "mlp", "B=8", "K=8", "d=8", "dtype=float32", "--dtype", "float16"],
            "argument --dtype: expected it or dtype=float32",
        ),
        (
            ["cost", "mlp", "B=8", "K=8", "d=8", "--hardware", "h1000"],
            "argument --hardware: 'h1000', expected",
        ),
        (["cost", "mlp", "B=8", "K=8", "d=8", "--hardware", "no.json"], "argument --hardware: no.json: "),
        (["calibrate", "--out", "no/such.json"], "argument --out: 'no/such.json', cannot be written"),
        (["calibrate", "--out", "rates"], "argument --out: 'rates', expected a name that ends in .json"),
        ([*COST, "mlp", "B=0", "K=8", "d=8"], "'0', expected a whole number from 1 to"),
        ([*COST, "mlp", "B", "K=8", "d=8"], "argument sizes: B: expected B=NUMBER"),
        ([*COST, "attention", "B=1", "H=3", "Hkv=2", "L=8", "d=8"], "k: expected"),
        (
            ["roofline", "short", "--plot", "a.png"],
            "argument results: short: expected a result of bench/run.py",
        ),
        (["roofline", "short", "--plot", "plot.txt"], "argument -o/--plot: 'plot.txt', expected a name"),
        (["calibrate", "--seconds", "0"], "argument --seconds: '0', expected a number above 0"),
    ],
)
def test_refusals_are_one_line_before_any_work(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("abc\n")
    Path("folder.png").mkdir()
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--device", "cpu", *arguments[1:]] if arguments[0] == "demo" else arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("python -m monoidreduce") and complaint in err
    assert err.count("\n") == 1 and err.endswith("\n")
    assert sorted(os.listdir()) == ["folder.png", "short"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_is_refused_where_there_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["demo", "--device", "cuda"])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
    assert err.startswith("python -m monoidreduce demo: error: argument --device: cuda: ")


@pytest.mark.parametrize("command", ["info", "demo"])
def test_an_instruction_set_that_is_none_is_refused(tmp_path: Path, command: str) -> None:
    status, out, err = ended(start(tmp_path, command, environment={"MONOIDREDUCE_CPU_ISA": "best"}))
    assert status == 2 and out == "" and err.count("\n") == 1
    assert f"{command}: error: MONOIDREDUCE_CPU_ISA: expected one of baseline" in err


@pytest.mark.parametrize("command", ["info", "demo"])
def test_a_tier_that_is_none_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MONOIDREDUCE_CUDA_TIER", "best")
    with pytest.raises(SystemExit) as stop:
        main([command])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1
    assert f"{command}: error: MONOIDREDUCE_CUDA_TIER: expected one of simt, sm80, sm90, got best" in err


def test_numbers_that_are_taken() -> None:
    seed = whole_number(-(2**63), 2**64 - 1)
    for value in (-(2**63), -1, 0, 2**64 - 1):
        torch.manual_seed(seed(str(value)))
    assert positive_number("1e-3") == 1e-3
    for text in ("0", "-1", "nan", "inf", "x", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a number above 0"):
            positive_number(text)


@pytest.mark.parametrize("suffix", PLOT_FORMATS)
def test_plots_have_a_format_in_any_case(suffix: str, tmp_path: Path) -> None:
    for name in (f"plot{suffix}", f"plot{suffix.upper()}"):
        assert plot_file(str(tmp_path / name)) == tmp_path / name
    assert not list(tmp_path.iterdir())


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder of a user who may not write everything: root becomes another one meanwhile."""
    with tempfile.TemporaryDirectory() as folder:
        if os.geteuid() != 0:
            yield Path(folder)
            return
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
        try:
            yield Path(folder)
        finally:
            os.seteuid(0)


def test_a_plot_that_may_not_be_written_is_refused(unprivileged: Path) -> None:
    plot = unprivileged / "plot.png"
    plot.touch(mode=0o400)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: Permission denied"):
        plot_file(str(plot))
    plot.unlink()
    unprivileged.chmod(0o500)
    with pytest.raises(argparse.ArgumentTypeError, match="cannot be written: Permission denied"):
        plot_file(str(plot))
    unprivileged.chmod(0o700)


def test_an_empty_path_is_not_the_working_directory() -> None:
    assert some_path("text") == Path("text")
    with pytest.raises(argparse.ArgumentTypeError, match="expected a file or a folder"):
        some_path("")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert not stop.value.code
    assert capsys.readouterr().out == f"monoidreduce {mr.__version__}\n"


# plan


def test_plan_compares_meshes_before_it_prints_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--mesh", "fsdp:2,tp:1", "--chips", "64", "--tokens", "1e12", "--recompute", "full"]
    assert main([*PLAN, *arguments]) == 0
    table, plan = capsys.readouterr().out.split("\n\n", 1)
    assert len(table.splitlines()) == 1 + 6  # tp divides 32 heads
    assert plan.startswith("llama3-8b, 8.03e+09 parameters, on 64 x v5p: fsdp ") and " days\n" in plan


def test_plan_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--mesh", "fsdp=8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"fsdp": 8} and found["model"] == "llama3-8b" and found["seconds"]["step"] > 0
    assert main([*PLAN, "--chips", "64", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["why"] and found["others"] and found["chips"] == 64


# bench


def test_bench_runs_no_file_of_another_project(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    for name in ("__init__.py", "run.py"):
        (tmp_path / "bench" / name).write_text("open('executed', 'w')")
    status, out, err = ended(start(tmp_path, "bench", "nothing"))
    assert not (tmp_path / "executed").exists()
    assert status == 2 and out == "" and err.count("\n") == 1
    reason = "what: nothing, expected" if is_clone(PACKAGES) else f"{tmp_path}: not a clone of monoidreduce"
    assert reason in err


def test_bench_runs_in_a_clone(tmp_path: Path) -> None:
    """In a copy of one without the package, whose sources would hide an installed one."""
    shutil.copytree(CLONE / "bench", tmp_path / "bench", ignore=shutil.ignore_patterns("results"))
    shutil.copy(CLONE / "pyproject.toml", tmp_path)
    status, _, err = ended(start(tmp_path, "bench", "nothing"))
    assert status == 2 and err.startswith("python bench/run.py: error: what: nothing, expected any of")


@pytest.mark.parametrize(
    ("about", "expected"),
    [
        ('[build-system]\n[project]\ndescription = ""\nname = "monoidreduce"\n', True),
        ('[project]\nname = "other"\n\n[[tool.x]]\nname = "monoidreduce"\n', False),
        ('[project]\nname = "monoidreduce-plus"\n', False),
        ('name = "monoidreduce"\n', False),
        (None, False),
    ],
)
def test_a_clone_is_told_by_the_name_of_the_project(
    tmp_path: Path, about: str | None, expected: bool
) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "run.py").touch()
    if about is not None:
        (tmp_path / "pyproject.toml").write_text(about)
    assert is_clone(tmp_path) == expected


def test_this_is_a_clone() -> None:
    assert is_clone(CLONE)


# Ends


def fake_torch(folder: Path, code: str) -> Path:
    """A folder whose module torch runs `code` when it is imported."""
    (folder / "modules").mkdir()
    (folder / "modules" / "torch.py").write_text(code)
    return folder / "modules"


INTERRUPTS_ITSELF = "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep({seconds})"


def test_interrupted_while_it_imports(tmp_path: Path) -> None:
    modules = fake_torch(tmp_path, INTERRUPTS_ITSELF.format(seconds=60))
    assert ended(start(tmp_path, "info", first=modules)) == (130, "", "interrupted\n")


def test_who_ignores_interrupts_goes_on_ignoring_them(tmp_path: Path) -> None:
    modules = fake_torch(tmp_path, INTERRUPTS_ITSELF.format(seconds=0.1) + "; raise SystemExit(7)")

    def ignore() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    assert ended(start(tmp_path, "info", first=modules, preexec_fn=ignore)) == (7, "", "")


def test_interrupted_while_it_trains(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("some text " * 100)
    process = start(tmp_path, "demo", "--device", "cpu", "--steps", "10", "--path", str(text))
    assert process.stderr is not None
    while "training" not in (line := process.stderr.readline()):
        assert line, "it ended before it trained"
    process.send_signal(signal.SIGINT)
    status, _, err = ended(process)
    # With tqdm the progress bar rewrites its line, which it leaves by a line break.
    lines = [line for line in err.splitlines() if line and not line.startswith("training")]
    assert status == 130 and lines == ["interrupted"]
    assert list(tmp_path.iterdir()) == [text]


def test_a_reader_that_stops_early_ends_it_silently(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    status, _, err = ended(start(tmp_path, "--help", stdout=writes))
    os.close(writes)
    assert status == -signal.SIGPIPE and err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    with Path("/dev/full").open("w") as full:
        status, _, err = ended(start(tmp_path, "--help", stdout=full))
    assert status == 1 and err == "error: [Errno 28] No space left on device\n"


# Files


def half(path: Path) -> None:
    """What Ctrl-C in the middle of writing does."""
    path.write_bytes(b"hal")
    raise KeyboardInterrupt


def test_a_file_takes_its_place_once_it_is_whole(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    link.symlink_to(file)
    for path, content in ((file, "first"), (link, "second")):
        with replacing(path) as beside:
            beside.write_text(content)
            assert file.exists() == (content == "second")
        assert file.read_text() == content
    file.chmod(0o640)
    with replacing(file) as beside:
        beside.write_text("third")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    with pytest.raises(KeyboardInterrupt), replacing(file) as beside:
        half(beside)
    assert file.read_text() == "third" and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [file, link]


@pytest.mark.parametrize("save", [lambda path, **_: path.write_bytes(b"whole"), lambda path, **_: half(path)])
def test_a_plot_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[..., None]
) -> None:
    figure = MagicMock()
    figure.subplots.return_value = [[MagicMock()]]
    figure.savefig.side_effect = save
    monkeypatch.setitem(sys.modules, "matplotlib", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "matplotlib.figure", SimpleNamespace(Figure=lambda **_: figure))
    plot = tmp_path / "plot.PNG"
    try:
        report.save_plot(plot, {"torch": Run([3.0, 2.0], 0.5), "monoidreduce": Run([3.0, 2.0], 0.5)}, [])
    except KeyboardInterrupt:
        assert not list(tmp_path.iterdir())
    else:
        assert plot.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [plot]
    assert figure.savefig.call_args.kwargs["format"] == "png"
