"""scripts/launch_trace.py: a comparison finds every launch that differs, and no other."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.release  # a test of tools

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "launch_trace.py"

Record = dict[str, Any]


def launch(kernel: str = "void a::fold<float>(a::Rows)") -> Record:
    return {
        "kernel": kernel,
        "device": 2,
        "grid": [132, 1, 1],
        "block": [384, 1, 1],
        "shared": 1024,
        "stream": 87,
        "parameters": ["q 64 k+128", "1"],
    }


def call(name: str = "f") -> Record:
    return {
        "machine": "H100",
        "call": name,
        "tier": "sm90, scratch 2",
        "reason": "tensor cores",
        "error": "",
        "launches": [launch(), launch("void a::combine()")],
    }


def compared(
    folder: Path, before: list[Record], after: list[Record], *options: object
) -> tuple[int, list[str]]:
    for name, calls in (("before", before), ("after", after)):
        (folder / f"{name}.json").write_text(json.dumps(calls))
    process = subprocess.run(
        [
            sys.executable,
            SCRIPT,
            "compare",
            folder / "before.json",
            folder / "after.json",
            *map(str, options),
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not process.stderr
    return process.returncode, process.stdout.splitlines()


def test_equal_records_pass(tmp_path):
    calls = [call(), call("g")]
    assert compared(tmp_path, calls, calls[::-1]) == (0, ["2 calls in both, 0 differ, are gone or new"])


def changed(change: Callable[[Record], None]) -> Record:
    after = copy.deepcopy(call())
    change(after)
    return after


CHANGES: dict[str, tuple[Callable[[Record], None], str]] = {
    "tier": (lambda c: c.update(tier="sm80"), "tier: sm90, scratch 2 -> sm80"),
    "reason": (lambda c: c.update(reason="none"), "reason: tensor cores -> none"),
    "error": (lambda c: c.update(error="no"), "error:  -> no"),
    "grid": (
        lambda c: c["launches"][0].update(grid=[133, 1, 1]),
        "launch 0: grid [132, 1, 1] -> [133, 1, 1]",
    ),
    "shared": (lambda c: c["launches"][1].update(shared=0), "launch 1: shared 1024 -> 0"),
    "parameter": (
        lambda c: c["launches"][0].update(parameters=["q 64 k+136", "1"]),
        "launch 0: parameter 0, byte 16: k+128 -> k+136",
    ),
    "longer parameter": (
        lambda c: c["launches"][0].update(parameters=["q 64 k+128 7", "1"]),
        "launch 0: parameter 0, byte 24: none -> 7",
    ),
    "gone": (lambda c: c["launches"].pop(), "launch 1 is gone: void a::combine()"),
    "new": (lambda c: c["launches"].append(launch("g()")), "launch 2 is new: g()"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_every_difference_is_found(case, tmp_path):
    change, line = CHANGES[case]
    status, output = compared(tmp_path, [call(), call("g")], [changed(change), call("g")])
    assert status == 1
    assert output == ["H100: f", f"  {line}", "2 calls in both, 1 differ, are gone or new"]


def test_another_kernel_is_one_difference(tmp_path):
    after = changed(lambda c: c["launches"][1].update(kernel="void b::other()", parameters=[]))
    status, output = compared(tmp_path, [call()], [after])
    assert status == 1
    assert output[:3] == ["H100: f", "  launch 1: void a::combine()", "   -> void b::other()"]


def test_calls_that_came_or_went_fail(tmp_path):
    status, output = compared(tmp_path, [call("f")], [call("g")])
    assert status == 1
    assert output[:4] == ["H100: f", "  the call is gone", "H100: g", "  the call is new"]


def test_reasons_can_be_ignored(tmp_path):
    after = changed(lambda c: c.update(reason="none"))
    assert compared(tmp_path, [call()], [after], "--ignore-reasons")[0] == 0


def test_namespaces_can_be_ignored(tmp_path):
    after = changed(lambda c: c["launches"][0].update(kernel="void b::fold<float>(c::Rows)"))
    assert compared(tmp_path, [call()], [after])[0] == 1
    assert compared(tmp_path, [call()], [after], "--ignore-namespaces")[0] == 0


def test_kernels_can_be_matched_by_their_code(tmp_path):
    def listed(name: str, code: str) -> Path:
        file = tmp_path / f"{name}-{code}.json"
        kernel = {"architecture": "sm_90", "name": f"void a::{name}()", "code": code, "source": "a.cu"}
        file.write_text(json.dumps([kernel]))
        return file

    after = changed(lambda c: c["launches"][1].update(kernel="void a::joined()"))
    assert compared(tmp_path, [call()], [after])[0] == 1
    options = ("--kernels", listed("combine", "1"))
    assert compared(tmp_path, [call()], [after], *options, listed("joined", "1"))[0] == 0
    assert compared(tmp_path, [call()], [after], *options, listed("joined", "2"))[0] == 1


def test_few_calls_are_shown_unless_all_are_asked_for(tmp_path):
    before, after = (
        [call(str(n)) for n in range(30)],
        [changed(lambda c, n=n: c.update(call=str(n), error="no")) for n in range(30)],
    )
    assert len(compared(tmp_path, before, after)[1]) == 2 * 20 + 2
    assert len(compared(tmp_path, before, after, "--all")[1]) == 2 * 30 + 1
