"""python -m monoidreduce calibrate: rates of the CPU."""

from __future__ import annotations

import json

import pytest

from monoidreduce.__main__ import main


def test_rates_are_those_of_some_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "cpu", "--seconds", "0.01", "--json"]) == 0
    rates = json.loads(capsys.readouterr().out)
    assert rates["device"] == "CPU" and set(rates["products"]) == {"bfloat16", "float32"}
    assert all(1e8 < rate < 1e15 for rate in rates["products"].values())
    assert 1e8 < rates["bandwidth"] < 1e13 and 1e8 < rates["cached"] < 1e14


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "--device", "cpu", "--seconds", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("CPU\n  products, bfloat16 ") and out.endswith(" FLOP a byte\n")
