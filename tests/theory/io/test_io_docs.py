"""docs/io.md says what the code does, and the command prints and draws it."""

from __future__ import annotations

import doctest
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import monoidreduce.theory.io
from monoidreduce.io import ALGORITHMS, compare, theta
from monoidreduce.theory.commands.io import main

pytestmark = pytest.mark.release  # a test of tools

DOCS = Path(__file__).parents[3] / "docs" / "io.md"
SESSIONS = re.findall(r"^```python\n(.*?)^```$", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("session", SESSIONS, ids=range(len(SESSIONS)))
def test_sessions_of_the_documentation(session: str, capsys: pytest.CaptureFixture[str]) -> None:
    test = doctest.DocTestParser().get_doctest(session, {}, "session", str(DOCS), 0)
    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0, capsys.readouterr().out


def test_the_docstring_of_the_package() -> None:
    results = doctest.testmod(monoidreduce.theory.io)
    assert results.attempted and not results.failed


# The command


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed == str(compare(8192, 128, [1024, 4096, 16384, 65536, 262144])) + "\n"
    assert all(f"\n{name} " in printed for name in ALGORITHMS)


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["-n", "256", "-d", "32", "--words", "3", "1024", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["cache"] == [3, 1024] and document["best"][0] is None
    assert document["algorithms"]["Algorithm 6"] == [None, 1500160]
    assert document["bounds"]["theta"][1] == theta(256, 32, 1024).words


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["-n", "0"], "argument -n: '0', expected a whole number from 1 to"),
        (["-d", "x"], "argument -d: 'x', expected a whole number"),
        (["--words", "64", "-1"], "argument --words: '-1', expected"),
        (["--plot", "no/figure.png"], "argument --plot: 'no/figure.png', cannot be written: No such file"),
        (["--plot", "figure.txt"], "argument --plot: 'figure.txt', expected a name that ends in"),
        (["table"], "unrecognized arguments: table"),
    ],
)
def test_refusals_are_one_line(
    arguments: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    assert err.startswith("python -m monoidreduce io: error: ") and complaint in err and err.count("\n") == 1


def test_a_figure_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(SystemExit) as stop:
        main(["--plot", str(tmp_path / "figure.png")])
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == ""
    refusal = "argument --plot: matplotlib is not installed: pip install matplotlib"
    assert err == f"python -m monoidreduce io: error: {refusal}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("sizes", [[], ["-n", "1", "-d", "64"]])
def test_the_figure(tmp_path: Path, sizes: list[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    assert main([*sizes, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert list(tmp_path.iterdir()) == [path]


def test_the_command_runs() -> None:
    command = [sys.executable, "-m", "monoidreduce", "io", "-n", "64", "-d", "8", "--words", "64"]
    package = Path(monoidreduce.__file__).resolve().parent.parent
    process = subprocess.run(command, capture_output=True, text=True, cwd=package)
    assert process.returncode == 0 and process.stdout.startswith("words moved / n^2 for n = 64, d = 8\n")
