"""scripts/count_host.py: what it reads of callgrind's dumps, and a count."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

from count_host import CALLS, ROOT, counts

pytestmark = pytest.mark.release  # a test of tools


def test_dumps_are_read_in_the_order_of_the_calls(tmp_path: Path) -> None:
    for part, name, total in ((10, "mlp, forward", 200), (2, "attention, with backward", 700)):
        lines = ["part: 1", f"desc: Trigger: Client Request: {name}", "fn=(1) a", f"totals: {total * CALLS}"]
        (tmp_path / f"callgrind.{part}").write_text("\n".join(lines))
    assert list(counts(tmp_path).items()) == [("attention, with backward", 700), ("mlp, forward", 200)]


@pytest.mark.slow
@pytest.mark.skipif(
    not (shutil.which("valgrind") and shutil.which("g++")), reason="needs valgrind and a C++ compiler"
)
def test_a_call_is_counted() -> None:
    command = [sys.executable, "scripts/count_host.py", "--calls", "logsumexp"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    forward, both = (line.rsplit(maxsplit=2) for line in done.stdout.splitlines())
    assert forward[0] == "logsumexp, forward" and both[0] == "logsumexp, with backward"
    assert 50 < float(forward[1]) < float(both[1]) < 5000  # thousand; less would be no call at all
