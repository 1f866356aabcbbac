"""What docs/planner.md prints is what its examples and commands print."""

from __future__ import annotations

import doctest
import re
import shlex
import sys
from pathlib import Path

import pytest

from monoidreduce.__main__ import main
from monoidreduce.plan import HARDWARE, MODELS, Batch, plans
from monoidreduce.theory.plan.figure import save_figure

pytestmark = pytest.mark.release  # a test of tools

PAGE = Path(__file__).resolve().parents[3] / "docs" / "planner.md"
TEXT = PAGE.read_text(encoding="utf-8").replace("\\\n", "")  # commands in one line
COMMANDS = re.findall(r"```console\n\$ python -m monoidreduce (.*)\n((?:.*\n)*?)```", TEXT)


def test_examples() -> None:
    examples = doctest.DocTestParser().get_doctest(TEXT.replace("```", ""), {}, "planner.md", None, 0)
    failed, attempted = doctest.DocTestRunner().run(examples)
    assert failed == 0 and attempted >= 30


def test_there_are_commands() -> None:
    assert len(COMMANDS) == 3


@pytest.mark.parametrize(("command", "printed"), COMMANDS)
def test_commands(command: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(command)) == 0
    assert capsys.readouterr().out == printed


# The picture

COMPARED = shlex.split(
    "plan --hardware h100 --model llama3-8b --batch 1e6 --mesh fsdp:0.11,tp:1 --chips 64 --mfu 0.5"
)


def test_the_command_of_the_picture_is_that_of_the_table() -> None:
    (named,) = re.findall(r"drawn by `python -m monoidreduce (plan [^`]*) --plot (docs/assets/[^`]*)`", TEXT)
    assert shlex.split(named[0]) == COMPARED
    assert (Path(__file__).resolve().parents[3] / named[1]).is_file() and named[1].removeprefix(
        "docs/"
    ) in TEXT


@pytest.mark.parametrize("mesh", [COMPARED, [*COMPARED[:-6], "--mesh", "fsdp=16:0.11,tp=4"]])
def test_the_command_draws(mesh: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plan.png"
    assert main([*mesh, "--plot", str(path)]) == 0
    drawn = capsys.readouterr().out
    assert path.read_bytes().startswith(b"\x89PNG") and [*tmp_path.iterdir()] == [path]
    assert main(mesh) == 0 and capsys.readouterr().out == drawn


def test_the_bars_are_the_seconds(tmp_path: Path) -> None:
    """As text of an SVG: a label for each mesh, and a legend of what is drawn."""
    pytest.importorskip("matplotlib")
    found = plans(
        MODELS["llama3-8b"], Batch(1e6, 4096), HARDWARE["h100"], 64, {"fsdp": 0.11, "tp": 1}, mfu=0.5
    )
    save_figure(tmp_path / "plan.svg", found)
    text = (tmp_path / "plan.svg").read_text()
    for label in ("arithmetic", "links of fsdp", "links of tp", "step", "fsdp 16, tp 4", "fsdp 64, tp 1"):
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
