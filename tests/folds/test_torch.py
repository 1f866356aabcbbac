"""statistics under torch.compile, export, opcheck, autocast, torch.func and with fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from folds import FOLDS, fold_inputs, leaves_of, outputs_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import monoidreduce as mr

stat = mr.stat


@pytest.fixture(autouse=True)
def no_graphs_of_earlier_tests() -> Iterator[None]:
    torch.compiler.reset()
    yield


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend="aot_eager", **options)


def results(fold: Any, call: dict[str, Any]) -> list[Tensor]:
    outputs = outputs_of(fold(**call))
    real = [t for t in outputs if t.requires_grad]
    return [*outputs, *torch.autograd.grad([t.sum() for t in real], leaves_of(call))]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.oldest
@pytest.mark.parametrize("name", FOLDS)
def test_compile(name: str) -> None:
    fold, call = fold_inputs(name, (2, 6), 30)
    assert_same(results(compiled(lambda **call: fold(**call)), call), results(fold, call))


def test_compile_of_any_size() -> None:
    function = compiled(lambda a, b: tuple(fold(a, b)), dynamic=True)
    fold, _ = fold_inputs("tempered")
    for rows, columns in ((5, 7), (9, 12), (16, 3)):
        a, b = torch.randn(rows, 4), torch.randn(columns, 4)
        assert_same(list(function(a, b)), list(fold(a, b)))


FACTOR = 1.0
F64 = torch.float64
BIAS = torch.tensor(0.0, dtype=F64, requires_grad=True)


@pytest.mark.oldest
def test_compiled_calls_see_what_the_function_reads() -> None:
    """Numbers of closures, globals and objects, and captured tensors with their gradients."""
    global FACTOR, BIAS
    offset, table = 0.5, torch.randn(9, dtype=F64, requires_grad=True)
    settings = type("Settings", (), {"power": 2})()

    def function(score: Any, column: Any) -> Any:
        return dict(x=stat.total(FACTOR * score**settings.power + offset + table[column] + BIAS))

    fold = mr.statistics(function)
    step = compiled(lambda a, b: fold(a, b).x)
    a, b = torch.randn(5, 3, dtype=F64), torch.randn(9, 3, dtype=F64)

    def check() -> None:
        expected = (FACTOR * (a @ b.T) ** settings.power + offset + table + BIAS).sum(1)
        torch.testing.assert_close(step(a, b), expected)
        found, of_bias = torch.autograd.grad(step(a, b).sum(), (table, BIAS))
        torch.testing.assert_close(found, torch.full((9,), 5.0, dtype=F64))
        assert of_bias == 45

    for number in (1.0, 2.0, 3.0, 1.0):
        FACTOR = number
        check()
    for number in (0.0, 0.25, 0.75):
        offset = number
        check()
    settings.power = 3
    check()
    table = torch.randn(9, dtype=F64, requires_grad=True)
    BIAS = torch.tensor(3.0, dtype=F64, requires_grad=True)
    check()


def test_a_captured_tensor_that_is_no_variable_of_the_function() -> None:
    holder = type("Holder", (), {})()
    holder.table = torch.randn(9)
    fold = mr.statistics(lambda score, column: dict(x=stat.total(score * holder.table[column])))
    a, b = torch.randn(5, 3), torch.randn(9, 3)
    step = compiled(lambda a, b: fold(a, b).x)
    for _ in range(2):
        torch.testing.assert_close(fold(a, b).x, (a @ b.T * holder.table).sum(1))
        torch.testing.assert_close(step(a, b), (a @ b.T * holder.table).sum(1))
        holder.table = torch.randn(9)


@pytest.mark.oldest
@pytest.mark.parametrize("strict", (True, False))
def test_export(strict: bool) -> None:
    fold, call = fold_inputs("token_stats", (6,), 30)

    class Module(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor, label: Tensor) -> Tensor:
            s = fold(a, b, label=label)
            return s.target - s.lse

    args = (call["a"].detach(), call["b"].detach(), call["label"])
    program = torch.export.export(Module(), args, strict=strict)
    torch.testing.assert_close(program.module()(*args), Module()(*args))


@pytest.mark.parametrize("name", ("token_stats", "reference_kl", "distances"))
def test_opcheck(name: str) -> None:
    fold, call = fold_inputs(name, (5,), 8, 4)
    seen: list[Any] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.monoidreduce.statistics.default:
                seen.append(args)
            return function(*args, **(kwargs or {}))

    with Record():
        fold(**call)
    (args,) = seen
    args = [x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x for x in args]
    torch.library.opcheck(torch.ops.monoidreduce.statistics.default, tuple(args))


def test_autocast() -> None:
    fold, call = fold_inputs("token_stats", (6,), 30, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s = fold(**call)
    low = {**call, "a": call["a"].bfloat16(), "b": call["b"].bfloat16()}
    assert s.lse.dtype == torch.float32
    assert_same(outputs_of(s), outputs_of(fold(**low)))


def test_vmap_and_jacobian() -> None:
    fold, call = fold_inputs("token_stats", (6,), 30)
    a, b, label = call["a"].detach(), call["b"].detach(), call["label"]
    batch = torch.stack([a, 2 * a, -a])
    mapped = torch.func.vmap(lambda x: fold(x, b, label=label).lse)(batch)
    assert_same(list(mapped), [fold(x, b, label=label).lse for x in batch])
    jacobian = torch.func.jacrev(lambda x: fold(x, b, label=label).mean)(a)
    expected = torch.func.jacrev(lambda x: fold.reference(x, b, label=label).mean)(a)
    torch.testing.assert_close(jacobian, expected)
    assert torch.autograd.gradcheck(
        lambda x, y: tuple(outputs_of(fold(x, y, label=label))[:4]), (call["a"], call["b"])
    )


def test_fake_tensors() -> None:
    fold, call = fold_inputs("token_stats", (2, 6), 30)
    fake = {name: t.detach() for name, t in call.items()}
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(t) for name, t in fake.items()}
        s = fold(**fake)
    assert s.lse.shape == (2, 6) and s.best.index.dtype == torch.int64


def test_flops() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    fold, call = fold_inputs("distances", (4,), 10, 6)
    constant = {"row": {"squares": torch.randn(4)}, "column": {"norms": torch.randn(10)}}
    for data, products in (({}, 6), (constant, 4)):
        given = {**call, **data}
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(fold(**given).kernel.sum(), leaves_of(given))
        assert counter.get_total_flops() == products * 2 * 4 * 10 * 6
