"""Ranks that disagree, after calls in which they agreed: all of them raise, and go on together."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Each, on_ranks, over
from torch import Tensor

import monoidreduce as mr
from monoidreduce import stat

ROWS, WIDTH, CLASSES = 6, 4, 5  # of classes as many on each rank


def _tensor(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).requires_grad_()


def _cross_entropy(group: Any, rows: int = ROWS, dtype: torch.dtype = torch.float32, **given: Any) -> Tensor:
    classes = given.pop("columns", CLASSES)
    target = torch.arange(rows) if "target" not in given else given.pop("target")
    x, weight = _tensor(rows, WIDTH, dtype=dtype), _tensor(classes, WIDTH, seed=1, dtype=dtype)
    return mr.linear_cross_entropy(x, weight, target, **over(group, given))


def _log_probs(group: Any, **given: Any) -> Tensor:
    x, weight = _tensor(ROWS, WIDTH), _tensor(CLASSES, WIDTH, seed=1)
    return mr.linear_log_probs(x, weight, torch.arange(ROWS), **over(group, given)).log_probs


def _distillation(group: Any, **given: Any) -> Tensor:
    x, weight = _tensor(ROWS, WIDTH), _tensor(CLASSES, WIDTH, seed=1)
    teacher = _tensor(ROWS, 3, seed=2).detach(), _tensor(CLASSES, 3, seed=3).detach()
    return mr.linear_distillation(x, weight, *teacher, **over(group, given))


def _lse(group: Any, **given: Any) -> Tensor:
    return mr.logsumexp_matmul(_tensor(ROWS, WIDTH), _tensor(CLASSES, WIDTH), **over(group, given))


def _mlp(group: Any, **given: Any) -> Tensor:
    x, w1, w2 = _tensor(ROWS, WIDTH), _tensor(7, WIDTH, seed=1), _tensor(WIDTH, 7, seed=2)
    return mr.mlp(x, w1, w2, **over(group, given))


def _attention(group: Any, positions: int = 8, **given: Any) -> Tensor:
    q, k, v = (_tensor(1, 4, positions, 8, seed=i) for i in range(3))
    return mr.attention(q, k, v, **over(group, given))


def _varlen(group: Any, starts: tuple[int, ...] = (0, 5, 16), **given: Any) -> Tensor:
    q, k, v = (_tensor(8, 4, 8, seed=i) for i in range(3))
    return mr.attention_varlen(q, k, v, torch.tensor(starts), **over(group, given))


@mr.statistics
def _moments(score: Tensor) -> dict[str, Tensor]:
    return dict(sum=stat.total(score))


@mr.statistics
def _squares(score: Tensor) -> dict[str, Tensor]:
    return dict(sum=stat.total(score * score))


def _statistics(group: Any, squares: bool = False, **given: Any) -> Tensor:
    function: Any = _squares if squares else _moments
    return function(_tensor(ROWS, WIDTH), _tensor(CLASSES, WIDTH, seed=1), **over(group, given)).sum


def _all_fold(group: Any, dtype: torch.dtype = torch.float32, rows: int = ROWS) -> Tensor:
    monoid = mr.monoids.LogSumExp()
    return mr.distributed.all_fold(monoid, monoid.State(_tensor(rows, dtype=dtype)), group).lse


def _map_reduce(group: Any, fails: bool = False, rows: int = ROWS) -> Tensor:
    monoid = mr.monoids.LogSumExp()

    def fold(a: Tensor, b: Tensor) -> Any:
        if fails:
            raise ZeroDivisionError("in the function")
        return monoid.State((a @ b.mT).logsumexp(1))

    a, b = _tensor(rows, WIDTH), _tensor(CLASSES, WIDTH, seed=1)
    return mr.map_reduce(monoid, fold, a, b, ranks=group).lse


def _unshard(group: Any, size: int = 3, **given: Any) -> Tensor:
    return mr.distributed.unshard(_tensor(size, 2), 0, group, **given)


FAR = torch.tensor([0, 1, 2, 3, 4, 99])
# What rank 1 calls, where all others call the function as before; and what is said of it.
DIFFERENT: dict[str, tuple[Callable[..., Tensor], Any, str]] = {
    "option": (_cross_entropy, {"z_loss": 0.5}, "z_loss: expected 0.0 as on rank 0, got 0.5"),
    "reduction": (
        _cross_entropy,
        {"reduction": "none"},
        "reduction: expected 'mean' as on rank 0, got 'none'",
    ),
    "dtype": (
        _cross_entropy,
        {"dtype": torch.float64},
        "x: expected torch.float32 [6, 4], requires_grad as on rank 0, got torch.float64",
    ),
    "tokens": (_cross_entropy, {"rows": 5}, "x: expected torch.float32 [6, 4], requires_grad as on rank 0"),
    "classes": (_cross_entropy, {"columns": 6}, "ranks.classes: expected 10 as on rank 0, got 12"),
    "a target": (_cross_entropy, {"target": FAR}, "target[5]: expected a class in [0, "),
    "a wrong option": (_cross_entropy, {"label_smoothing": 2.0}, "label_smoothing: expected a number in"),
    "workspace": (_cross_entropy, {"workspace": -1}, "workspace: expected None or an int >= 0, got -1"),
    "top1": (_log_probs, {"top1": True}, "top1: expected False"),
    "temperature": (_log_probs, {"temperature": 2.0}, "temperature: expected 1.0 as on rank 0, got 2.0"),
    "loss": (_distillation, {"loss": "reverse_kl"}, "loss: expected 'cross_entropy' as on rank 0"),
    "jsd": (_distillation, {"loss": "jsd"}, "ranks: expected None beside bias"),
    "scale": (_lse, {"scale": 2.0}, "scale: expected 1.0 as on rank 0, got 2.0"),
    "activation": (_mlp, {"activation": "silu"}, "activation: expected 'gelu_tanh' as on rank 0, got 'silu'"),
    "ulysses": (
        _attention,
        {"causal": True},
        "window (causal is one that ends at 0): expected (-1, -1) as on rank 0, got (-1, 0)",
    ),
    "method": (
        _attention,
        {"method": "all_gather"},
        "ranks.method: expected auto as on rank 0, got all_gather",
    ),
    "positions": (_attention, {"positions": 6}, "queries: expected 16 as on rank 0, got 12"),
    "mod": (
        _attention,
        {"mask_mod": lambda b, h, i, j: i > j},
        "mask_mod: expected None beside ranks",
    ),
    "starts": (_varlen, {"starts": (0, 6, 16)}, "cu_seqlens_q: expected torch.int64 [3] up to 16, digest"),
    "function": (_statistics, {"squares": True}, "operator: expected _moments as on rank 0, got _squares"),
    "state": (_all_fold, {"dtype": torch.float64}, "state: expected torch.float32 [6] as on rank 0"),
    "rows of a state": (_all_fold, {"rows": 5}, "state: expected torch.float32 [6] as on rank 0"),
    "rows of a": (_map_reduce, {"rows": 5}, "a[0]: expected torch.float32 [6, 4]"),
    "an error of a function": (_map_reduce, {"fails": True}, "in the function"),
    "uneven parts": (_unshard, {"size": 4}, "tensor (its size along dim; give length= where parts differ): "),
    "length": (_unshard, {"size": 4, "length": 6}, "tensor: expected 3 positions on rank 1 of 2"),
}


def _step(group: Any, function: Callable[..., Tensor], given: dict[str, Any]) -> list[Tensor]:
    """The result and the gradients of a call."""
    found = function(group, **given)
    leaves = _leaves(found.grad_fn)
    return [found.detach(), *torch.autograd.grad(found.sum(), leaves)]


def _leaves(node: Any) -> list[Tensor]:
    if node is None:
        return []
    if hasattr(node, "variable"):
        return [node.variable]
    return [leaf for child, _ in node.next_functions for leaf in _leaves(child)]


def _caught(function: Callable[..., Any], *args: Any) -> tuple[str, str, float]:
    start = time.monotonic()
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - start
    return "", "", 0.0


def _disagree(group: Any, name: str, steps: int) -> Any:
    """What is raised after so many steps in which ranks agree; and a step before and behind."""
    function, different, _ = DIFFERENT[name]
    before = [_step(group, function, {}) for _ in range(1 + steps)] if steps else []
    error = _caught(_step, group, function, different if group.rank() == 1 else {})
    behind = _step(group, function, {})
    return error, before[-1] if before else behind, behind


@pytest.mark.parametrize("ranks, steps", ((2, 0), (2, 1), (2, 2), (3, 1)))
def test_all_ranks_raise_and_go_on(ranks: int, steps: int) -> None:
    for name, (_, _, expected) in DIFFERENT.items():
        if ranks > 2 and name in ("classes", "positions", "starts", "length", "ulysses", "method"):
            continue  # whose numbers are of two ranks
        found = on_ranks(ranks, _disagree, name, steps)
        for rank, ((kind, text, seconds), before, behind) in enumerate(found):
            assert kind and expected in text and seconds < 10, (name, rank, kind, text)
            assert text.startswith("rank 1: ") or rank == 1, (name, rank, text)
            assert all(torch.equal(a, b) for a, b in zip(before, behind, strict=True)), name


def _in_another_order(group: Any) -> Any:
    """Two operators in turn, and rank 1 with the second one first; then its backward passes swapped."""
    calls = [_cross_entropy, _log_probs]
    for _ in range(2):
        for function in calls:
            _step(group, function, {})
    forward = _caught(_step, group, calls[group.rank()], {})
    losses = [_cross_entropy(group), _cross_entropy(group, rows=5), _cross_entropy(group)]
    order = [0, 1, 2] if group.rank() == 0 else [2, 1, 0]

    def backward() -> None:
        for i in order:
            losses[i].backward()

    backward_error = _caught(backward)
    return forward, backward_error, _caught(_step, group, _cross_entropy, {})


def test_calls_in_another_order() -> None:
    for forward, backward, behind in on_ranks(2, _in_another_order):
        assert forward[:2] == (
            "ValueError",
            "rank 1: operator: expected linear_cross_entropy as on rank 0, got linear_log_probs",
        )
        assert backward[:2] == ("ValueError", "rank 1: calls on the group: expected 1 as on rank 0, got 3")
        assert behind[0] == ""


def _without_a_graph(group: Any) -> Any:
    """Rank 1 records no graph: the others would wait for it in their backward pass."""
    _step(group, _cross_entropy, {})
    with torch.set_grad_enabled(group.rank() == 0):
        return _caught(_cross_entropy, group)


def test_a_rank_that_records_no_graph() -> None:
    for kind, text, _ in on_ranks(2, _without_a_graph):
        assert kind == "ValueError"
        assert text == (
            "rank 1: x: expected torch.float32 [6, 4], requires_grad as on rank 0, got torch.float32 [6, 4]"
        )


def _counted(group: Any, sizes: list[int]) -> list[int]:
    """How many collectives steps with so many rows take."""
    from torch.distributed.tensor.debug import CommDebugMode

    found = []
    for rows in sizes:
        with CommDebugMode() as counted:
            _step(group, _cross_entropy, {"rows": rows})
        found.append(int(counted.get_total_counts()))
    return found


def test_a_step_like_those_before_takes_no_further_collective() -> None:
    """One forward and two backward; one more for each message that is not as before."""
    for found in on_ranks(2, _counted, [6, 6, 6, 5, 5, 6, 5, 6, 5, 6]):
        assert found[2] == 3 and found[-3:] == [3, 3, 3]
        assert max(found[1:]) <= 6


def _fails_alone(group: Any) -> Any:
    """Backward, where rank 1's kernel fails between two messages."""
    from unittest import mock

    from monoidreduce.distributed import fold

    _step(group, _cross_entropy, {})
    loss = _cross_entropy(group)

    def failing(name: str) -> Any:
        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        return fail, fail

    with mock.patch.object(fold, "unrecorded", failing if group.rank() == 1 else fold.unrecorded):
        error = _caught(loss.backward)
    return error, _caught(_step, group, _cross_entropy, {})


def test_a_rank_without_memory_in_its_backward_pass() -> None:
    (first, behind), (second, _) = on_ranks(2, _fails_alone)
    assert first[:2] == ("RuntimeError", "rank 1: OutOfMemoryError: no memory") and behind[0] == ""
    assert second[:2] == ("OutOfMemoryError", "no memory")


def test_columns_of_other_sizes_are_no_other_call() -> None:
    """A rank's own columns are its own: other sizes of them are no other call."""
    for found in on_ranks(2, _uneven, Each([7, 5])):
        assert found[0] == ""


def _uneven(group: Any, hidden: int) -> Any:
    def call() -> Tensor:
        x, w1, w2 = _tensor(ROWS, WIDTH), _tensor(hidden, WIDTH, seed=1), _tensor(WIDTH, hidden, seed=2)
        return mr.mlp(x, w1, w2, ranks=group)

    call()
    return _caught(call)


class _Arrived:
    """An event of a GPU that has nothing left to do."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


def _as_on_gpus(group: Any, name: str) -> Any:
    """As `_disagree`, in a forward and then a backward pass, with headers that are looked at later."""
    from unittest import mock

    from monoidreduce.distributed.messages import Channel

    function, different, _ = DIFFERENT[name]
    Channel._of_groups.pop(group, None)
    with (
        mock.patch.object(Channel, "_at_once", lambda *_: False),
        mock.patch.object(torch.cuda, "Event", _Arrived),
    ):
        first = _caught(_step, group, function, different if group.rank() == 1 else {})
        before = [_step(group, function, {}) for _ in range(2)]
        losses: list[Tensor] = []
        given = different if group.rank() == 1 else {}
        forward = _caught(lambda: losses.append(function(group, **given)))
        backward = _caught(losses[0].sum().backward) if losses else ("", "", 0.0)
        behind = _step(group, function, {})
    Channel._of_groups.pop(group, None)
    finite = [bool(loss.isfinite().all()) for loss in losses]
    return first, forward, finite, backward, all(map(torch.equal, before[-1], behind))


@pytest.mark.parametrize("name", ("option", "temperature", "activation", "ulysses"))
def test_headers_that_are_looked_at_later(name: str) -> None:
    """A first call compares all before data is sent; later ones raise before their next message."""
    expected = DIFFERENT[name][2]
    for rank, (first, forward, finite, backward, same) in enumerate(on_ranks(2, _as_on_gpus, name)):
        assert first[:2] == ("ValueError", f"rank 1: {expected}")
        later = forward if forward[0] else backward  # a forward pass may have several messages
        assert later[0] == "ValueError" and finite in ([True], [])
        given, here = expected.split(" as on rank 0, got ")
        if rank == 0:
            assert later[1] == f"rank 1: {given} as on rank 0, got another value"
        else:
            argument = given.split(": expected")[0]
            assert later[1] == f"rank 1: {argument}: expected another value as on rank 0, got {here}"
        assert same


def test_a_rank_that_fails_where_headers_are_looked_at_later() -> None:
    """It sends NaN, so that nobody takes the result for one."""
    (first, forward, finite, backward, same), failed = on_ranks(2, _as_on_gpus, "a wrong option")
    assert "label_smoothing" in first[1] and forward[0] == "" and finite == [False]
    assert backward[:2] == (
        "RuntimeError",
        "rank 1: raised an error, while other ranks called linear_cross_entropy; its own message tells which",
    )
    assert failed[1][0] == "ValueError" and "label_smoothing" in failed[1][1]
    assert same and failed[-1]


def test_headers_of_a_group_that_sends_nothing_are_not_compared() -> None:
    """torch's fake backend (bench/overhead.py measures with it) fills results with anything."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from monoidreduce.distributed.messages import HEADER_BYTES, NO_CALL, Channel, _Headers

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        channel, arrived = Channel(dist.group.WORLD), _Arrived()  # type: ignore[arg-type]
        anything = torch.arange(2 * HEADER_BYTES, dtype=torch.uint8).view(2, -1)
        headers = _Headers(anything, arrived, bytes(anything[0].tolist()), NO_CALL)  # type: ignore[arg-type]
        channel.under_way.append(headers)
        channel.look()
        assert not channel.under_way
        channel.silent = False  # as a backend that sends
        channel.under_way.append(headers)
        with pytest.raises(ValueError, match="rank 1"):
            channel.look()
    finally:
        dist.destroy_process_group()
