"""python -m monoidreduce roofline: the points of bench/results, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.publish import RESULTS
from monoidreduce.__main__ import main
from monoidreduce.hardware import find
from monoidreduce.theory.commands.roofline import latest, measured_roof, peers, points
from monoidreduce.theory.costs.sizes import OPERATORS

H100 = find("h100")
FILES = sorted(RESULTS.glob("nvidia_h100_*.json"))


DOCUMENTS = [d for file in FILES if (d := json.loads(file.read_text("utf-8")))["speed"]]


def test_every_point_is_under_the_measured_roof() -> None:
    """The target of the specification: 1.02 of it, by the rates that torch had beside the results."""
    roof = measured_roof(DOCUMENTS)
    assert H100.measured is not None and 1 <= roof.peak / H100.measured.peak < 1.05
    found = [*points(latest(DOCUMENTS), H100)]
    assert {p.op for p in found} == set(OPERATORS) and len(found) >= 60
    others = [*peers(latest(DOCUMENTS), H100)]
    assert 2 * len(others) == len(found)
    assert [p for p in (*found, *others) if p.rate > 1.02 * roof.rate(p.intensity)] == []


def test_a_point_is_of_the_model_and_of_the_result() -> None:
    """Of B 2, H 16, L 8192, d 128: 2 products, of 43 tiles of 192 columns; q, k, v, out, statistics."""
    (file,) = (file for file in FILES if file.name.endswith("attention.json") and "accuracy" not in file.name)
    document = json.loads(file.read_text("utf-8"))
    sizes = {"B": 2, "H": 16, "L": 8192, "d": 128, "causal": False}
    (row,) = (r for r in document["speed"] if r["parameters"] == sizes and r["dtype"] == "bfloat16")
    forward, backward = points([row], H100)
    assert [(p.op, p.phase) for p in (forward, backward)] == [
        ("attention", "forward"),
        ("attention", "backward"),
    ]
    flops, tensor = 4 * 32 * 8192 * (43 * 192) * 128, 32 * 8192 * 128 * 2
    assert forward.intensity == pytest.approx(flops / (4 * tensor + 8 * 32 * 8192))
    milliseconds = row["phases"]["forward"]["milliseconds"]["monoidreduce"]["median"]
    assert forward.rate == pytest.approx(1e3 * flops / milliseconds)
    useful = 4 * 32 * 8192**2 * 128
    (other,) = peers([row], H100)
    assert other.intensity == pytest.approx(3 * useful / (12 * tensor), rel=0.1)  # and statistics
    times = row["phases"]["total"]["milliseconds"]
    fastest = min(times[name]["median"] for name in times if not name.startswith("monoidreduce"))
    assert other.phase == "total" and other.rate == pytest.approx(1e3 * 3 * useful / fastest)


def test_the_last_run_of_a_case_counts() -> None:
    row = {"op": "mlp", "parameters": {"B": 8}, "dtype": "bfloat16"}
    runs = [{"environment": {"date": f"2030-01-0{day}"}, "speed": [row | {"day": day}]} for day in (2, 3, 1)]
    assert latest(runs) == [row | {"day": 3}]


def test_operators_without_a_model_have_no_points() -> None:
    """Results of folds of one's own, which `mr.cost` does not know."""
    (file,) = (file for file in FILES if file.name.endswith("_folds.json"))
    assert list(points(json.loads(file.read_text("utf-8"))["speed"], H100)) == []


def test_the_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(RESULTS.parents[1])  # a clone, where the command looks for results
    picture = tmp_path / "roofline.svg"
    assert main(["roofline", *map(str, FILES), "-o", str(picture)]) == 0
    told = capsys.readouterr().out
    assert told.endswith(" points\n")
    text = picture.read_text("utf-8")
    assert text.startswith("<?xml") and "roof, measured" in text and "fastest other, both" in text
    assert (
        main(["roofline", "-o", str(picture)]) == 0 and capsys.readouterr().out == told
    )  # the committed ones


def test_results_of_another_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["roofline", str(FILES[0]), "--hardware", "b200", "--plot", str(tmp_path / "a.svg")])
    assert stop.value.code == 2 and "expected 16-bit cases on b200, got none" in capsys.readouterr().err
