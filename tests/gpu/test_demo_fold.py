"""The demo of a fold where kernels are compiled, at a tiny scale."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch

from monoidreduce import demo
from monoidreduce.demo import fold
from monoidreduce.demo.fold import FoldScale
from monoidreduce.folds.cuda import kernels


def test_command_compiles_and_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not kernels.is_available():
        pytest.skip("no NVRTC: pip install --group nvrtc")
    before = os.environ.get("MONOIDREDUCE_CACHE_DIR")
    tiny = FoldScale(64, 64, [256, 1024], torch.bfloat16, checked=16, seconds=1e-3)
    monkeypatch.setitem(fold.SCALES, "cuda", tiny)
    plot = tmp_path / "plot.png"
    assert demo.main(["fold", "--device", "cuda", "--plot", str(plot)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^NVRTC [\d.]+ compiled the kernels of both passes in [\d.]+ ms\.$", said, re.M)
    assert re.search(r"^A later process reads them from the cache on disk, here in [\d.]+ ms\.$", said, re.M)
    assert "Forward pass: statistics_fold/cuda/" in said
    assert re.search(r"^token_stats +[\d.]+ ms +[\d.]+ ms +[\d.]+ MiB$", said, re.M)
    assert plot.exists() == ("no plot" not in said)
    assert os.environ.get("MONOIDREDUCE_CACHE_DIR") == before
