"""Units of a call compile side by side: which they are, and what those that ask for them get."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce._ops.engine import user_kernels
from monoidreduce.folds import modified_attention_op, statistics_op
from monoidreduce.folds.cuda import ahead, compiler, kernels
from monoidreduce.folds.cuda.cache import Image

HOPPER = _C.DeviceFacts(9, 0, multiprocessors=132, cache_bytes=50 << 20, shared_bytes=232448)
MINUTE = 60.0  # by when a thread must have done what takes a moment


@mr.statistics
def lse_target(score: Any, column: Any, label: Any) -> Any:
    target = mr.stat.total(torch.where(column == label, score, 0.0))
    return dict(lse=mr.stat.softmax(score).logsumexp, target=target)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `user_kernels.recorded` is in each forward pass."""
    seen: list[Any] = []
    for module in (statistics_op, modified_attention_op):
        forward = module.forward

        def noting(*args: Any, forward: Callable[..., Any] = forward) -> Any:
            seen.append(user_kernels.recorded)
            return forward(*args)

        monkeypatch.setattr(module, "forward", noting)
    return seen


def in_bfloat16(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16)


def test_units_of_a_fold(recorded: list[Any]) -> None:
    a, b = in_bfloat16(64, 64).requires_grad_(), in_bfloat16(500, 64)
    lse_target(a, b, label=torch.randint(500, (64,)))
    name, arguments, needed = recorded[0]
    assert name == "statistics" and arguments[0] is not None and needed[:2] == (True, False)
    units = ahead.units_of(name, arguments, needed, HOPPER)
    assert [unit[:2] for unit in units] == [(kernels.compiled, which) for which in ("fold", "gradient")]
    assert all(unit[4:7] == (torch.bfloat16, "sm90", (9, 0)) for unit in units)


@pytest.mark.parametrize(("rows", "row_block"), ((1, 128), (128, 128), (129, 256)))
def test_few_rows_have_clusters_of_one_block(recorded: list[Any], rows: int, row_block: int) -> None:
    a, b = in_bfloat16(rows, 64).requires_grad_(), in_bfloat16(500, 64)
    lse_target(a, b, label=torch.randint(500, (rows,)))
    fold, _ = ahead.units_of(*recorded[0], HOPPER)
    assert fold[1] == "fold" and fold[-1] == row_block


def test_units_of_attention_with_a_learned_table(recorded: list[Any]) -> None:
    q, k, v = (in_bfloat16(1, 2, 128, 64) for _ in range(3))
    gates = torch.randn(2, 128, requires_grad=True)
    mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + gates[h, i] - gates[h, j])
    units = ahead.units_of(*recorded[0], HOPPER)
    made = [(unit[0], unit[2]) for unit in units]
    passes = (kernels.FORWARD, kernels.BACKWARD)
    assert made[:2] == [(kernels.compiled_scores, which) for which in passes]
    assert units[1][-1] == "floats"  # with the gradient of the table
    assert [make for make, _ in made[2:]] == [kernels.compiled_payload]  # what it is by queries


def test_units_of_a_table_in_the_deterministic_mode(recorded: list[Any]) -> None:
    """The backward pass runs twice, with a kernel each. Tables without the query are folds."""
    q, k, v = (in_bfloat16(1, 2, 128, 64) for _ in range(3))
    table = torch.randn(2, 257, requires_grad=True)
    mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, i - j + 128])
    mr.attention(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j])
    torch.use_deterministic_algorithms(True)
    try:
        by_both, by_key = (ahead.units_of(*call, HOPPER) for call in recorded if call)
    finally:
        torch.use_deterministic_algorithms(False)
    passes = (kernels.FORWARD, kernels.BACKWARD_IN_TURN, kernels.BACKWARD_IN_TURN)
    assert [unit[2] for unit in by_both] == list(passes)
    assert [unit[-1] for unit in by_both[1:]] == ["largest", "integers"]
    assert by_key[1][:1] == (kernels.compiled_scores,) and by_key[1][-1] is None


def test_calls_that_autograd_does_not_record_note_nothing(recorded: list[Any]) -> None:
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    label = torch.zeros(3, dtype=torch.int64)
    lse_target(a, b, label=label)
    a.requires_grad_()
    with torch.no_grad():
        lse_target(a, b, label=label)
    assert recorded == [None, None]


def test_nothing_is_noted_after_a_call(monkeypatch: pytest.MonkeyPatch, recorded: list[Any]) -> None:
    a, b = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    label = torch.zeros(3, dtype=torch.int64)
    lse_target(a, b, label=label)
    assert recorded[0] is not None and user_kernels.recorded is None

    def fails(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(statistics_op, "forward", fails)
    with pytest.raises(MemoryError):
        lse_target(a, b, label=label)
    assert user_kernels.recorded is None


def started(monkeypatch: pytest.MonkeyPatch, *units: Any) -> None:
    """As if these were the units of a call."""
    monkeypatch.setattr(ahead, "units_of", lambda *call: [*units])
    ahead._start()


def test_a_unit_that_is_not_on_disk_starts_the_others_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    found = compiler.find()
    if found is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    calls: list[Any] = []
    started = threading.Event()

    def start(*call: Any) -> None:
        calls.append((*call, threading.get_ident()))
        started.set()

    a = SimpleNamespace(device=torch.device("cuda", 1))  # there need not be a GPU
    monkeypatch.setattr(ahead, "_start", start)
    monkeypatch.setattr(ahead, "_C", SimpleNamespace(facts_of=lambda index: (HOPPER, index)))
    monkeypatch.setattr(user_kernels, "recorded", ("statistics", (a, 2), (True,)))
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", "off")
    kernel = "template <int> __global__ void kernel() {}"
    for _ in range(2):  # once for a call
        kernels.compiled_unit(found, kernel, ["kernel<1>"], "simt", (9, 0))
    assert started.wait(MINUTE)
    ((*call, thread),) = calls
    assert call == ["statistics", (a, 2), (True,), (HOPPER, 1)] and thread != threading.get_ident()


def test_units_compile_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(3)

    def make(name: str) -> Image:
        together.wait(MINUTE)
        return Image(b"code", (name,), "")

    monkeypatch.setattr(ahead, "_images", {})
    started(monkeypatch, (make, "forward"), (make, "backward"), (make, "tables"))
    for name in ("forward", "backward", "tables"):
        assert ahead.image_of((make, name)).names == (name,)
    assert ahead._images == {}


def test_a_unit_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    may_end = threading.Event()

    def make() -> Image:
        made.append(threading.get_ident())
        assert may_end.wait(MINUTE)
        return Image(b"code", ("kernel",), "")

    monkeypatch.setattr(ahead, "_images", {})
    started(monkeypatch, (make,), (make,))
    threading.Timer(0.05, may_end.set).start()
    assert ahead.image_of((make,)).code == b"code"
    assert len(made) == 1 and made[0] != threading.get_ident()


def test_an_error_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Image:
        raise compiler.CompilationError("line 3: nonsense")

    monkeypatch.setattr(ahead, "_images", {})
    started(monkeypatch, (make,))
    with pytest.raises(compiler.CompilationError, match="line 3: nonsense"):
        ahead.image_of((make,))
    with pytest.raises(compiler.CompilationError, match="line 3: nonsense"):
        ahead.image_of((make,))  # now in this thread
    assert ahead._images == {}


def test_a_dry_run_that_fails_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise ValueError

    monkeypatch.setattr(ahead, "units_of", fails)
    monkeypatch.setattr(ahead, "_images", {})
    ahead._start()
    assert ahead._images == {}


def test_without_more_threads_units_compile_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoMore(threading.Thread):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    def make(name: str) -> Image:
        return Image(b"code", (name,), "")

    monkeypatch.setattr(ahead, "_images", {})
    monkeypatch.setattr(ahead, "Thread", NoMore)
    monkeypatch.setattr(ahead, "_C", SimpleNamespace(facts_of=lambda index: HOPPER))
    call = ("statistics", (SimpleNamespace(device=torch.device("cuda", 0)),), (True,))
    monkeypatch.setattr(user_kernels, "recorded", call)
    ahead.compile_others()
    assert ahead._images == {}
    started(monkeypatch, (make, "forward"), (make, "backward"))
    assert [ahead.image_of((make, name)).names for name in ("forward", "backward")] == [
        ("forward",),
        ("backward",),
    ]


def test_kernels_of_both_passes_compile_in_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recorded: list[Any]
) -> None:
    """By NVRTC, without a folder where they could be kept."""
    found = compiler.find()
    if found is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", "off")
    monkeypatch.setattr(ahead, "_images", {})
    loaded: list[tuple[bytes, list[str]]] = []
    threads: list[int] = []

    def load(code: bytes, names: list[str]) -> int:
        loaded.append((code, names))
        return len(loaded)

    def noting(*args: Any) -> Image:
        threads.append(threading.get_ident())
        return compile_unit(*args)

    compile_unit = compiler.Compiler.compile
    monkeypatch.setattr(_C, "load_kernels", load)
    monkeypatch.setattr(compiler.Compiler, "compile", noting)
    kernels._loaded.cache_clear()
    a, b = torch.randn(64, 3, requires_grad=True), torch.randn(50, 3)
    lse_target(a, b, label=torch.randint(50, (64,)))
    call = (*recorded[0], HOPPER)
    units = ahead.units_of(*call)
    assert [unit[0] for unit in units] == [kernels.compiled, kernels.compiled_row_gradient]
    ahead._start(*call)
    assert [kernels.handle_of(*unit) for unit in units] == [1, 2]
    assert len({*threads, threading.get_ident()}) == 3
    alone = [unit[0](*unit[1:]) for unit in units]
    assert loaded == [(image.code, [*image.names]) for image in alone]
    kernels._loaded.cache_clear()
