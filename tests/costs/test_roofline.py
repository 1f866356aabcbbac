"""python -m monoidreduce roofline: the points of bench/results, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.publish import RESULTS
from monoidreduce.__main__ import main
from monoidreduce.costs.roofline import points
from monoidreduce.hardware import find

H100 = find("h100")
FILES = sorted(RESULTS.glob("nvidia_h100_*.json"))


def test_every_point_is_under_the_measured_roof() -> None:
    assert H100.measured is not None
    found = [p for file in FILES for p in points(json.loads(file.read_text("utf-8")), H100)]
    assert {p.contender for p in found} > {"monoidreduce", "torch"} and len(found) >= 200
    above = [
        p for p in found if p.rate > 1.02 * min(H100.measured.peak, p.intensity * H100.measured.bandwidth)
    ]
    assert above == []


def test_a_point_is_what_the_result_says() -> None:
    """Of B 2, H 16, L 8192, d 128: q, k, v and out, again with a gradient each, and q, k, v once more."""
    (file,) = (file for file in FILES if file.name.endswith("attention.json") and "accuracy" not in file.name)
    document = json.loads(file.read_text("utf-8"))
    sizes = {"B": 2, "H": 16, "L": 8192, "d": 128, "causal": False}
    (row,) = (r for r in document["speed"] if r["parameters"] == sizes and r["dtype"] == "bfloat16")
    point = next(points({"speed": [row]}, H100))
    assert (point.contender, point.op) == ("monoidreduce", "attention")
    assert point.rate == pytest.approx(1e9 * row["phases"]["total"]["gflops"])
    assert point.intensity == pytest.approx(12 * 32 * 8192**2 * 128 / (11 * 32 * 8192 * 128 * 2))


def test_operators_without_a_model_have_no_points() -> None:
    """Results of folds of one's own, which `mr.cost` does not know."""
    (file,) = (file for file in FILES if file.name.endswith("_folds.json"))
    assert list(points(json.loads(file.read_text("utf-8")), H100)) == []


def test_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "roofline.svg"
    assert main(["roofline", *map(str, FILES), "--plot", str(picture)]) == 0
    assert "points" in capsys.readouterr().out
    text = picture.read_text("utf-8")
    assert text.startswith("<?xml") and "roof, measured" in text


def test_results_of_another_gpu_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["roofline", str(FILES[0]), "--hardware", "b200", "--plot", str(tmp_path / "a.svg")])
    assert stop.value.code == 2 and "expected 16-bit cases on b200, got none" in capsys.readouterr().err
