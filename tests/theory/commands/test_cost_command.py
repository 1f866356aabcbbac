"""python -m monoidreduce cost: calls by their sizes."""

from __future__ import annotations

import json

import pytest
import torch

import monoidreduce as mr
from monoidreduce import plan
from monoidreduce.__main__ import main
from monoidreduce.theory.costs.sizes import SIZES

GIVEN = {
    "B": 2,
    "H": 4,
    "L": 300,
    "N": 500,
    "V": 1000,
    "D": 64,
    "E": 32,
    "K": 700,
    "M": 300,
    "F": 64,
    "d": 64,
}


@pytest.mark.parametrize("operator", SIZES)
def test_every_operator(operator: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = SIZES[operator][0].split()
    assert main(["cost", operator, *(f"{n}={GIVEN[n]}" for n in needed), "--hardware", "a100"]) == 0
    assert capsys.readouterr().out.startswith(f"{operator} on a100: ")


def test_options_are_those_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["B=1", "H=8", "Hkv=2", "L=256", "N=512", "d=64", "causal", "window=100", "softcap=30", "bias"]
    arguments = ["--hardware", "h200", "--dtype", "float16", "--forward", "--json"]
    assert main(["cost", "attention", *sizes, *arguments]) == 0
    q, k = (torch.empty(1, h, n, 64, dtype=torch.float16, device="meta") for h, n in ((8, 256), (2, 512)))
    bias = torch.empty(1, 8, 256, 512, dtype=torch.float16, device="meta")
    options = {"causal": True, "window": (100, 100), "softcap": 30.0, "bias": bias}
    expected = mr.cost("attention", q, k, k, hardware="h200", needed=(), **options)
    assert json.loads(capsys.readouterr().out) == json.loads(expected.to_json())


def test_an_mlp_may_be_gated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "mlp", "B=512", "K=1024", "d=256", "gated", "--hardware", "h100", "--json"]) == 0
    x, up, down = (
        torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((512, 256), (1024, 256), (256, 1024))
    )
    expected = mr.cost("mlp", x, up, down, gate=up, activation="silu", hardware="h100")
    assert json.loads(capsys.readouterr().out) == json.loads(expected.to_json())


def test_the_workspace(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["cost", "linear_cross_entropy", "N=1024", "V=32000", "D=512", "--hardware", "h100", "--json"]
    peaks = []
    for workspace in (4 << 20, 1 << 30):
        assert main([*call, "--workspace", str(workspace)]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_memory"])
    assert peaks[0] < peaks[1]


def test_over_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """The ways to split a call, the fastest first."""
    call = [
        "cost",
        "linear_cross_entropy",
        "N=8192",
        "V=128256",
        "D=4096",
        "--hardware",
        "h200",
        "--ranks",
        "8",
    ]
    assert main(call) == 0
    expected = plan.splits("linear_cross_entropy", {"N": 8192, "V": 128256, "D": 4096}, 8, "h200")
    assert capsys.readouterr().out == "\n\n".join(map(str, expected)) + "\n"


def test_a_dtype_among_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    call = ["cost", "--hardware", "h100", "mlp", "B=512", "K=1024", "d=256"]
    printed = []
    for dtype in (["dtype=float16"], ["--dtype", "float16"], ["dtype=float32"]):
        assert main([*call, *dtype]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]


def test_sizes_beyond_torchs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    most = f"={1 << 40}"
    with pytest.raises(SystemExit) as stop:
        main(["cost", "attention", f"B{most}", f"H{most}", "L=1024", "d=64", "--hardware", "h100"])
    complaint = "sizes: expected tensors of at most 2^50 bytes, got one of shape"
    assert stop.value.code == 2 and complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sizes", "options", "complaint"),
    [
        ([], ["--ranks", "12"], "ranks: expected at most 8, or whole nodes of as many, got 12"),
        ([], ["--ranks", "8", "--json"], "argument --ranks: expected neither --forward nor --json beside it"),
        (["window=8"], ["--ranks", "8"], "sizes: expected B, H, L, d, and perhaps Hkv, causal, softcap"),
    ],
)
def test_ranks_that_are_refused(
    sizes: list[str], options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["cost", "attention", "B=1", "H=8", "L=1024", "d=64", *sizes, "--hardware", "h200", *options])
    assert complaint in capsys.readouterr().err
