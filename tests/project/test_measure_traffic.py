"""scripts/measure_traffic.py: reads ncu's table, gives kernels to passes, judges counters by the model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_traffic
import traffic_calls
from measure_traffic import COUNTERS, Kernel, by_pass, kernels, with_counters

from bench import report, traffic
from monoidreduce.theory.costs.sizes import OPERATORS, call_of

pytestmark = pytest.mark.release  # a test of tools

NAMES = "ID|Process ID|Process Name|Host Name|Kernel Name|Context|Stream|Block Size|Grid Size|Device|CC"


def line(*cells: object) -> str:
    return ",".join(f'"{cell}"' for cell in cells)


def of_kernel(number: int, name: str, *counts: str) -> str:
    before = number, 77, "python3", "127.0.0.1", name, 1, 7, "(384, 1, 1)", "(132, 1, 1)", 0, "9.0"
    return line(*before, *counts)


# Written by hand, after the format that Nsight Compute documents for --csv --page raw: no output of ncu.
TABLE = "\n".join(
    [
        "==PROF== Connected to process 77 (/usr/bin/python3)",
        '==PROF== Profiling "spin_kernel" - 0: 0%....50%....100% - 1 pass',
        line(*NAMES.split("|"), *COUNTERS),
        line(*[""] * 11, "byte", "byte", "sector", "sector"),
        of_kernel(0, "spin_kernel", "2,560", "0", "128", "0"),
        of_kernel(1, "vectorized_elementwise_kernel", "6,400", "750", "300", "0"),
        of_kernel(2, "spin_kernel", "2,560", "0", "128", "0"),
        of_kernel(3, "attention_forward", "2,000,000", "40", "1,500", "30"),
        of_kernel(4, "merge", "500.0", "8", "0", "0"),
        "==PROF== Disconnected from process 77",
    ]
)


def rows() -> list[dict[str, Any]]:
    """A calibration, whose reads of L2 are counted 1.5 times, and one pass."""
    calibration = {"read": 6400, "written": 1000, "l2": 6400}
    model = {"read": 2_000_000, "written": 50, "l2": 4000}
    return [
        traffic.row("negate", "float32", {}, "forward", 7150, calibration, 0.1, unwritten=200),
        traffic.row("attention", "bfloat16", {"L": 4, "causal": True}, "forward", 1_000_000, model, 0.3),
    ]


def test_kernels_are_read_with_their_bytes() -> None:
    assert list(kernels(TABLE)) == [
        Kernel("spin_kernel", 2560, 0, 4096),
        Kernel("vectorized_elementwise_kernel", 6400, 750, 9600),
        Kernel("spin_kernel", 2560, 0, 4096),
        Kernel("attention_forward", 2_000_000, 40, 48_960),
        Kernel("merge", 500, 8, 0),
    ]


def test_other_units_are_read_too() -> None:
    table = TABLE.replace('"byte","byte"', '"Kbyte","Mbyte"')
    assert list(kernels(table))[3] == Kernel("attention_forward", 2_000_000_000, 40_000_000, 48_960)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM", "expected a table with Kernel Name"),
        (TABLE.replace(COUNTERS[2], "lts__other"), f"expected a table with .*{COUNTERS[2]}"),
        (
            TABLE.replace('"byte","byte"', '"byte","cycle"'),
            f"{COUNTERS[1]}: expected a unit of .* got 'cycle'",
        ),
        (
            TABLE.replace("2,000,000", "n/a"),
            f"attention_forward: {COUNTERS[0]}: expected a number, got 'n/a'",
        ),
    ],
)
def test_what_is_no_such_table_is_refused(table: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(kernels(table))


def test_kernels_belong_to_the_pass_whose_mark_they_follow() -> None:
    passes = by_pass(kernels(TABLE))
    assert [[kernel.name for kernel in found] for found in passes] == [
        ["vectorized_elementwise_kernel"],
        ["attention_forward", "merge"],
    ]
    with pytest.raises(ValueError, match="expected spin_kernel first, got merge"):
        by_pass(iter([Kernel("merge", 1, 1, 1)]))


def test_counters_are_summed_and_l2_is_calibrated() -> None:
    calibration, attention = with_counters(rows(), by_pass(kernels(TABLE)))
    assert calibration["counter"] == {"read": 6400, "written": 750, "l2": 6400}
    assert attention["counter"] == {"read": 2_000_500, "written": 48, "l2": 32_640}
    assert [kernel["name"] for kernel in attention["kernels"]] == ["attention_forward", "merge"]
    assert report.met_traffic(calibration) and report.met_traffic(attention)


@pytest.mark.parametrize("passes", [[], [[Kernel("a", 1, 1, 1)]], [[Kernel("a", 1, 1, 1)], []]])
def test_passes_without_kernels_are_refused(passes: list[list[Kernel]]) -> None:
    with pytest.raises(ValueError, match="expected kernels of 2 passes"):
        with_counters(rows(), passes)


@pytest.mark.parametrize(
    ("counter", "met"),
    [
        ({"read": 2_000_000, "written": 50}, True),
        ({"read": 2_600_000, "written": 35}, True),
        ({"read": 2_600_001, "written": 50}, False),
        ({"read": 1_399_999, "written": 50}, False),
        ({"read": 2_000_000, "written": 66}, False),
        ({"read": 2_000_000, "written": 34}, False),
    ],
)
def test_the_model_holds_within_its_tolerance(counter: dict[str, int], met: bool) -> None:
    assert report.met_traffic({**rows()[1], "counter": counter}) is met


def test_fewer_bytes_than_compulsory_are_an_error() -> None:
    counted = {**rows()[1], "counter": {"read": 1_500_000, "written": 50}}
    assert report.met_traffic(counted)
    assert not report.met_traffic({**counted, "compulsory": 1_500_051})


@pytest.mark.parametrize(("op", "parameters"), traffic_calls.SMALL, ids=[op for op, _ in traffic_calls.SMALL])
def test_cases_have_a_model_of_both_passes(op: str, parameters: dict[str, Any]) -> None:
    tensors = call_of(OPERATORS[op], parameters, traffic_calls.DTYPE)[0]
    forward, backward = traffic_calls.rows_of(op, parameters, "h100", tensors)
    assert (forward["phase"], backward["phase"]) == ("forward", "backward")
    for one in (forward, backward):
        low, high = one["allowed"]["read"]
        assert 0 < low < one["model"]["read"] < high
        assert 0 <= one["unwritten"] <= one["model"]["written"]
        assert one["compulsory"] > 0


def test_every_operator_is_counted() -> None:
    for cases in (traffic_calls.CASES, traffic_calls.SMALL):
        assert {op for op, _ in cases} == set(OPERATORS)


COUNTED = next(traffic.RESULTS.glob("nvidia_h100*_traffic.json"))


def test_committed_counts_stand_beside_the_model_as_it_is() -> None:
    document = json.loads(COUNTED.read_text("utf-8"))
    rows = measure_traffic.modelled_again(document)
    assert rows == document["traffic"], f"python scripts/measure_traffic.py --counted {COUNTED.name} --out"
    assert [(row["op"], row["phase"]) for row in rows if not report.met_traffic(row)] == []


def test_counts_without_a_backward_pass_are_refused() -> None:
    document = json.loads(COUNTED.read_text("utf-8"))
    del document["traffic"][2]
    with pytest.raises(ValueError, match="expected a forward and a backward pass of each case"):
        measure_traffic.modelled_again(document)


def test_counts_need_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert measure_traffic.main(["--counted", str(COUNTED), "--check"]) == 0
    found = capsys.readouterr()
    assert found.out.count("| met ") == 17 and found.err == ""


def test_results_are_written_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = {
        "device": "A GPU",
        "threads": 2,
        "torch": "2.6.0",
        "monoidreduce": "1.2.3",
        "commit": "abc",
        "date": "2030-01-01",
        "command": "a command",
        "load_average": 9.0,
    }
    counted = with_counters(rows(), by_pass(kernels(TABLE)))
    assert traffic.report(environment, counted, tmp_path, True, "cuda") == 0
    text = capsys.readouterr().out
    assert "## A GPU: traffic" in text and "busy" not in text
    case = (
        "| attention L 4, causal | bfloat16 | forward | 2, 2.001 | 5e-05, 4.8e-05 | 0.004, 0.03264 | 2.00 |"
    )
    assert f"{case} met" in " ".join(text.split())
    document = json.loads((tmp_path / "a_gpu_cuda_traffic.json").read_text())
    assert document["traffic"] == counted and document["speed"] == []
    counted[1]["counter"]["read"] *= 2
    assert traffic.report(environment, counted, None, False, "cuda") == 0
    assert traffic.report(environment, counted, None, True, "cuda") == 1
    found = capsys.readouterr()
    assert "**MISSED**" in found.out and "1 of 2 passes are not as the model says" in found.err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--small", "--wrong"], "unrecognized arguments: --wrong"),
        (["--out", ""], "argument --out: '', expected a file or a folder"),
    ],
)
def test_arguments_are_checked(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        measure_traffic.main(argv)
    assert stop.value.code == 2 and said in capsys.readouterr().err


def test_a_machine_without_a_gpu_or_ncu_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        measure_traffic.main([])
    assert stop.value.code == 2 and "expected an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as stop:
        measure_traffic.main([])
    assert stop.value.code == 2 and "ncu: expected on PATH" in capsys.readouterr().err


@pytest.mark.parametrize("status", [0, 9])
def test_counters_that_may_not_be_read_are_told(status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = ("sh", "-c", f"echo ==ERROR== ERR_NVGPUCTRPERM - no permission; echo more; exit {status}", "--")
    monkeypatch.setattr(measure_traffic, "NCU", fails)
    with pytest.raises(
        SystemExit, match=f"ncu: failed with {status}: ==ERROR== ERR_NVGPUCTRPERM - no permission"
    ):
        measure_traffic.measured(small=True)


def test_a_call_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        measure_traffic, "NCU", ("sh", "-c", "echo one; echo two; echo three >&2; exit 1", "--")
    )
    with pytest.raises(SystemExit, match="ncu: failed with 1: two three"):
        measure_traffic.measured(small=True)


def test_ncu_is_asked_for_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A stand-in for ncu: arguments are --log-file=FILE, the interpreter, the program, its file, --small."""
    Path(tmp_path, "rows").write_text(json.dumps(rows()))
    Path(tmp_path, "table").write_text(TABLE)
    stand_in = f'cp "{tmp_path}/table" "${{1#--log-file=}}"; [ "$5" = --small ] && cp "{tmp_path}/rows" "$4"'
    monkeypatch.setattr(measure_traffic, "NCU", ("sh", "-c", stand_in, "--"))
    counted = measure_traffic.measured(small=True)
    assert counted == with_counters(rows(), by_pass(kernels(TABLE)))
