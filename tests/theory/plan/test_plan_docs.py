"""What docs/planner.md prints is what its examples and commands print."""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from pathlib import Path
from statistics import median

import pytest

from monoidreduce.__main__ import main
from monoidreduce.plan import HARDWARE, MODELS, RUNS, Batch, plans, rates_of
from monoidreduce.theory.plan.figure import save_figure
from monoidreduce.theory.plan.runs import bounds

pytestmark = pytest.mark.release  # a test of tools

DOCS = Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "planner.md").read_text(encoding="utf-8").replace("\\\n", "")  # commands in one line
RUNS_PAGE = (DOCS / "published_runs.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"```console\n\$ python -m monoidreduce (.*)\n((?:.*\n)*?)```", TEXT + RUNS_PAGE)


def test_examples() -> None:
    examples = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, "planner.md", None, 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert failed == 0 and attempted >= 30


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 6


@pytest.mark.parametrize(("command", "printed"), COMMANDS)
def test_commands(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


# The picture

COMPARED = shlex.split(
    "plan --hardware h100 --model llama3-8b --batch 1e6 --mesh fsdp,tp --chips 64 --microbatch 1"
)


def test_the_command_of_the_picture_is_that_of_the_table() -> None:
    (named,) = re.findall(r"drawn by `python -m monoidreduce (plan [^`]*) --plot (docs/assets/[^`]*)`", TEXT)
    assert shlex.split(named[0]) == COMPARED
    assert (DOCS.parent / named[1]).is_file() and named[1].removeprefix("docs/") in TEXT


@pytest.mark.parametrize("mesh", [COMPARED, [*COMPARED[:-6], "--mesh", "fsdp=16,tp=4"]])
def test_the_command_draws(mesh: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main([*mesh, "--plot", str(path)]) == 0
    drawn = capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [path]
    assert main(mesh) == 0 and capsys.readouterr().out == drawn


def test_the_bars_are_the_parts_of_a_step(tmp_path: Path) -> None:
    """As text of an SVG: a label for each mesh, and a legend of what is drawn."""
    pytest.importorskip("matplotlib")
    found = plans(MODELS["llama3-8b"], Batch(1e6, 4096, 1), HARDWARE["h100"], 64, ("fsdp", "tp"))
    save_figure(tmp_path / "plan.svg", found)
    text = (tmp_path / "plan.svg").read_text()
    for label in ("products", "attention", "waits for fsdp", "waits for tp", "optimizer", "fsdp 16", "tp 4"):
        assert f"<!-- {label} -->" in text


def test_a_picture_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stop:
        main([*COMPARED, "--plot", str(tmp_path / "plan.png")])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and not list(tmp_path.iterdir())
    refusal = "argument --plot: matplotlib is not installed: pip install matplotlib"
    assert err == f"python -m monoidreduce plan: error: {refusal}\n"


# The bounds that the page of runs states


def test_stated_bounds() -> None:
    for what, fitted in (("fitted to", True), ("held out", False)):
        runs = [run for run in RUNS if run.fitted == fitted]
        middle, worst = bounds(runs)
        assert f"| {what} | {len(runs)} | {middle:.1%} | {worst:.1%} |" in RUNS_PAGE
    kinds = {
        "dense models in 16 bits": lambda run: not run.plan.model.experts and not run.plan.precision.float8,
        "dense models in 8 bits": lambda run: not run.plan.model.experts and run.plan.precision.float8,
        "models of experts": lambda run: run.plan.model.experts,
    }
    for what, of in kinds.items():
        runs = [run for run in RUNS if not run.fitted and of(run)]
        middle, worst = bounds(runs)
        assert f"| of these, {what} | {len(runs)} | {middle:.1%} | {worst:.1%} |" in RUNS_PAGE
    memory = [abs(run.memory_error) for run in RUNS if run.memory_error is not None]
    errors = f"{median(memory):.1%} in the median and {max(memory):.1%} at worst."
    assert f"for {len(memory)} runs. Its error is {errors}" in RUNS_PAGE


def test_stated_constants() -> None:
    rates = [rates_of(HARDWARE[name]) for name in ("a100", "h100", "v4")]
    products = " | ".join(f"{of.matmul:.2f}" for of in rates)
    assert f"| of the peak, by large products | {products} |" in RUNS_PAGE
    assert f"| of the peak, by fused attention | {rates[0].attention} | {rates[1].attention} |" in RUNS_PAGE
    assert f"| of the peak, by attention with sinks | | {rates[1].sinks} |" in RUNS_PAGE
    assert f"takes {1e3 * rates[1].launching:.2f} ms to launch" in RUNS_PAGE
    assert all(f"- {run.source.split(',')[0]}: " in RUNS_PAGE for run in RUNS if run.assumed)
