"""python -m monoidreduce calibrate: rates of the CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import monoidreduce as mr
from monoidreduce.__main__ import main
from monoidreduce.hardware import HARDWARE, Hardware, Measured, load

pytestmark = pytest.mark.release  # a test of tools


def test_rates_are_those_of_some_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "cpu", "--seconds", "0.01", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)
    assert rates["device"] == "CPU" and set(rates["products"]) == {"bfloat16", "float32"}
    # Of any machine, however busy.
    assert all(1e6 < rate < 1e15 for rate in rates["products"].values())
    assert 1e6 < rates["bandwidth"] < 1e13 and 1e6 < rates["cached"] < 1e14


def test_a_file_is_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    assert main(["calibrate", "--device", "cpu", "--seconds", "0.01", "--out", str(file)]) == 0
    rates = json.loads(file.read_text("utf-8"))
    q = torch.empty(1, 8, 1024, 64, device="meta")
    found = mr.cost("attention", q, q, q, hardware=str(file))
    rate = found.useful_flops / found.seconds / rates["products"]["float32"]
    assert found.hardware.name == "mine" and found.of_matmul_rate == pytest.approx(rate)
    capsys.readouterr()
    sizes = ["B=1", "H=8", "L=1024", "d=64", "dtype=float32"]
    assert main(["cost", "attention", *sizes, "--hardware", str(file)]) == 0
    assert capsys.readouterr().out == f"{found}\n"


def test_a_file_of_a_gpu_has_its_measured_rates(tmp_path: Path) -> None:
    file = tmp_path / "ours.json"
    rates = {"products": {"bfloat16": 6e14, "float32": 5e13}, "bandwidth": 2.5e12, "cached": 5e12}
    file.write_text(json.dumps({"device": "NVIDIA H100 80GB HBM3", **rates}))
    found, h100 = load(file), HARDWARE["h100"]
    assert isinstance(found, Hardware) and h100.measured is not None
    source = "python -m monoidreduce calibrate --out ours.json"
    assert found.measured == Measured(6e14, 2.5e12, h100.measured.l2, source)
    assert replace(found, name="h100", measured=h100.measured) == h100


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no JSON", "hardware: expected a file that `python -m monoidreduce calibrate --out` writes, got "),
        ('{"device": "CPU"}', "hardware: expected a file that "),
        ('{"device": "CPU", "products": {"float32": -1}, "bandwidth": 1}', "hardware: expected a file that "),
        (
            '{"device": "NVIDIA GH200 480GB", "products": {"bfloat16": 1e15}, "bandwidth": 1e12}',
            "hardware: expected rates of one of NVIDIA A100-SXM4-40GB, .*, got NVIDIA GH200 480GB",
        ),
    ],
)
def test_other_files_are_refused(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"^{complaint}"):
        load(file)


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "cpu", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("CPU\n  products, bfloat16 ") and out.endswith(" FLOP a byte\n")
