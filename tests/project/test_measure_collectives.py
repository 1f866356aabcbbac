"""scripts/measure_collectives.py: what it calls, counts and fits. Its times are asserted nowhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

sys.path.append(str(Path(__file__).resolve().parents[2]))
sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import measure_collectives
from measure_collectives import FITTED, collectives, fitted, measure, sends

from bench import report
from monoidreduce import plan
from monoidreduce.hardware import Link
from monoidreduce.theory.plan.collectives import COLLECTIVES

pytestmark = pytest.mark.release  # a test of tools

LINK = Link(rate=2e9, latency=1e-4, source="by hand")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_two_ranks_send_what_the_ring_of_the_paper_sends(name: str) -> None:
    """Appendix C without its dummy chunks."""
    found = sends(LINK, 2, 1 << 20)
    assert list(found) == list(COLLECTIVES)
    assert found[name].bytes == plan.ring(name, 2, dummy=False).sent * (1 << 20)


def test_sends_of_more_ranks() -> None:
    found = {name: send.bytes / (1 << 20) for name, send in sends(LINK, 8, 1 << 20).items()}
    expected = {"all-gather": 7 / 8, "reduce-scatter": 7 / 8, "all-reduce": 14 / 8, "all-to-all": 7 / 64}
    assert found == expected


def test_a_line_is_found_again() -> None:
    sent = [2.0**20, 2.0**24, 2.0**29]
    assert fitted(sent, [1e-4 + each / 2e9 for each in sent]) == pytest.approx((1e-4, 2e9), rel=1e-9)
    latency, rate = fitted([1e6, 2e6], [1e-3, 2.1e-3])  # the line through both is below 0 at 0 bytes
    assert latency == 0 and 1e9 / 1.1 < rate < 1e9


def _called(group: Any) -> list[list[float]]:
    rank = float(torch.distributed.get_rank(group))
    answers = []
    for name in COLLECTIVES:
        whole, own = torch.full((4,), 10 + rank), torch.tensor([100 + rank, 200 + rank])
        found = collectives(whole, own, group)[name]
        found()
        answers.append({"all-reduce": whole, "all-gather": whole}.get(name, own).tolist())
    return answers


def test_the_calls_are_the_collectives() -> None:
    """All-gather, reduce-scatter, all-reduce; an all-to-all leaves its input as it was."""
    for rank, found in enumerate(on_ranks(2, _called)):
        assert found == [[100, 200, 101, 201], [21, 21], [21] * 4, [100 + rank, 200 + rank]]


def _measured(group: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    link, rows = measure(group, torch.device("cpu"), [1, 2], rounds=2)
    return link, [*rows]


def test_a_run_of_two_ranks() -> None:
    (link, rows), (other_link, other_rows) = on_ranks(2, _measured)
    assert link == pytest.approx(other_link, rel=1e-9)
    assert [row["milliseconds"] for row in rows] == [row["milliseconds"] for row in other_rows]
    assert json.loads(json.dumps(rows)) == rows
    assert [row["collective"] for row in rows] == [*COLLECTIVES] * 2
    assert [row["fitted"] for row in rows] == [name == FITTED for name in COLLECTIVES] * 2
    assert [row["bytes"] for row in rows] == [1 << 20] * 4 + [2 << 20] * 4
    for row in rows:
        latencies = 2 if row["collective"] == "all-reduce" else 1
        seconds = latencies * link["latency"] + row["sent"] / link["rate"]
        assert row["predicted"] == pytest.approx(1e3 * seconds, rel=1e-9)
        assert row["milliseconds"]["median"] > 0 and row["ranks"] == 2
    text = report.collectives_table(rows)
    assert all(name in line for name, line in zip([*COLLECTIVES] * 2, text.splitlines()[2:], strict=True))


def row(collective: str, mib: float, ratio: float) -> dict[str, Any]:
    return {
        "collective": collective,
        "ranks": 2,
        "bytes": int(mib * 2**20),
        "sent": mib * 2**19,
        "milliseconds": {"median": 2.0 * ratio},
        "predicted": 2.0,
        "fitted": collective == FITTED,
    }


@pytest.mark.parametrize(
    ("one", "met", "cell"),
    [
        (row("all-reduce", 64, 1.25), True, "met"),
        (row("all-reduce", 64, 0.75), True, "met"),
        (row("all-reduce", 64, 1.26), False, "**MISSED**"),
        (row("all-to-all", 512, 0.74), False, "**MISSED**"),
        (row("all-to-all", 63, 9.0), None, "-"),
        (row("all-gather", 64, 9.0), None, "fitted"),
    ],
)
def test_large_collectives_are_held_to_the_formulas(one: dict[str, Any], met: bool | None, cell: str) -> None:
    assert report.met_collective(one) is met
    assert report.collectives_table([one]).splitlines()[2].split("|")[-2].strip() == cell
    machine = dict.fromkeys(("device", "threads", "torch", "monoidreduce", "commit", "date", "command"), "x")
    document = {"environment": machine | {"load_average": 0, "threads": 1}, "link": {"rate": 1, "latency": 1}}
    document |= {"speed": [], "memory": [], "overhead": [], "collectives": [one]}
    missed = "all-reduce of 64 MiB over 2 ranks: 1.26 of the formula"
    assert (missed in report.tables(document)) == (one["milliseconds"]["median"] == 2.52)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "no rank: start it by torchrun --nproc-per-node 2"),
        (["--mib", "0", "1"], "argument --mib: '0', expected a whole number from 1 to"),
        (["--mib", "64", "64"], "argument --mib: expected two sizes or more"),
        (["--mib", "1", "2", "--check"], "argument --mib: expected a size of 64 or more"),
        (["--rounds", "1"], "argument --rounds: '1', expected a whole number from 2 to"),
    ],
)
def test_refusals(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if arguments:
        monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        measure_collectives.main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2 and complaint in err and err.count("\n") == 1
