"""mr.Ranks: the values it takes, what it equals, and which of its options an operator uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Each, on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import monoidreduce as mr


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of four ranks in this process, for what sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "given, error, expected",
    (
        ({"classes": -1}, ValueError, "ranks.classes: expected None or an int >= 0, got -1"),
        ({"classes": 1.5}, TypeError, "ranks.classes: expected None or an int >= 0, got 1.5"),
        ({"classes": True}, TypeError, "ranks.classes: expected None or an int >= 0, got True"),
        ({"sequence_parallel": 1}, TypeError, "ranks.sequence_parallel: expected True or False, got 1"),
        ({"grad_dtype": torch.int64}, TypeError, "ranks.grad_dtype: expected None, float64, float32"),
        ({"grad_dtype": "bfloat16"}, TypeError, "ranks.grad_dtype: expected None, float64, float32"),
        (
            {"method": "ring"},
            ValueError,
            "ranks.method: expected one of auto, ulysses, all_gather, got 'ring'",
        ),
        ({"layout": None}, ValueError, "ranks.layout: expected one of contiguous, zigzag, got None"),
        ({"length": -2}, ValueError, "ranks.length: expected None or an int >= 0, got -2"),
        ({"length": "4"}, TypeError, "ranks.length: expected None or an int >= 0, got '4'"),
        ({"group": None}, TypeError, "ranks.group: expected a ProcessGroup or a one-dimensional DeviceMesh"),
        ({"group": 3}, TypeError, "ranks.group: expected a ProcessGroup or a one-dimensional DeviceMesh"),
    ),
)
def test_wrong_values(group: Any, given: dict[str, Any], error: type[Exception], expected: str) -> None:
    """They are refused when it is made, before a call."""
    with pytest.raises(error) as raised:
        mr.Ranks(**{"group": group} | given)
    assert str(raised.value).startswith(expected)


def test_meshes(group: Any) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    assert mr.Ranks(mesh["rows"]).group == mesh["rows"]
    with pytest.raises(ValueError, match=r"ranks\.group: expected a ProcessGroup or a one-dimensional"):
        mr.Ranks(mesh)
    with pytest.raises(ValueError, match=r"ranks: expected a monoidreduce\.Ranks, a ProcessGroup or a one-"):
        mr.logsumexp_matmul(torch.ones(2, 2), torch.ones(2, 2), ranks=mesh)


def test_it_is_a_value(group: Any) -> None:
    ranks = mr.Ranks(group, classes=np.int64(7), sequence_parallel=np.bool_(True), length=np.int32(3))
    assert ranks == mr.Ranks(group, classes=7, sequence_parallel=True, length=3)
    assert type(ranks.classes) is int and type(ranks.length) is int and ranks.sequence_parallel is True
    assert hash(ranks) == hash(dataclasses.replace(ranks))
    assert dataclasses.replace(ranks, classes=8).classes == 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        ranks.classes = 8  # type: ignore[misc]
    with pytest.raises(TypeError, match="positional"):
        mr.Ranks(group, 7)  # type: ignore[misc]


SET: dict[str, Any] = {
    "classes": 4,
    "sequence_parallel": True,
    "grad_dtype": torch.float32,
    "method": "ulysses",
    "layout": "zigzag",
    "length": 4,
}
OF_COLUMNS = {"classes", "sequence_parallel", "grad_dtype"}
OF_POSITIONS = {"method", "layout", "length", "grad_dtype"}


def _x(*shape: int) -> Tensor:
    return torch.ones(shape or (4, 4))


@mr.statistics
def _total(score: Any) -> dict[str, Any]:
    return {"total": mr.stat.total(score)}


def _slices(a: Tensor, b: Tensor) -> Any:
    return mr.monoids.LogSumExp.State((a @ b.mT).logsumexp(1))


LSE = mr.monoids.LogSumExp()
STARTS, TARGET = torch.tensor([0, 4]), torch.tensor([0, 1, 2, 3])
OPERATORS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "linear_cross_entropy": (lambda **o: mr.linear_cross_entropy(_x(), _x(), TARGET, **o), OF_COLUMNS),
    "linear_log_probs": (lambda **o: mr.linear_log_probs(_x(), _x(), TARGET, **o), OF_COLUMNS),
    "linear_distillation": (lambda **o: mr.linear_distillation(_x(), _x(), _x(), _x(), **o), OF_COLUMNS),
    "logsumexp_matmul": (lambda **o: mr.logsumexp_matmul(_x(), _x(), **o), OF_COLUMNS),
    "_total": (lambda **o: _total(_x(), _x(), **o), OF_COLUMNS),
    "mlp": (lambda **o: mr.mlp(_x(), _x(), _x(), **o), OF_COLUMNS - {"classes"}),
    "gated mlp": (lambda **o: mr.mlp(_x(), _x(), _x(), gate=_x(), **o), OF_COLUMNS - {"classes"}),
    "attention": (lambda **o: mr.attention(*[_x(1, 1, 4, 4)] * 3, **o), OF_POSITIONS),
    "attention_varlen": (lambda **o: mr.attention_varlen(*[_x(4, 1, 4)] * 3, STARTS, **o), OF_POSITIONS),
    "map_reduce": (lambda **o: mr.map_reduce(LSE, _slices, _x(), _x(), **o), set()),
    "all_fold": (lambda ranks: mr.distributed.all_fold(LSE, LSE.State(_x(4)), ranks), set()),
}  # fmt: skip


def _refused(group: Any, operator: str) -> dict[str, str]:
    """What an operator says of options that it does not use, by option."""
    found = {}
    for option, value in SET.items():
        try:
            OPERATORS[operator][0](ranks=mr.Ranks(group, **{option: value}))
        except ValueError as error:
            found[option] = str(error)
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_options_that_an_operator_does_not_use(operator: str) -> None:
    """Which it refuses by name, and uses all others. One rank takes any of their values above."""
    (found,) = on_ranks(1, _refused, operator)
    assert found.keys() == SET.keys() - OPERATORS[operator][1]
    for option, text in found.items():
        assert text.startswith(f"ranks.{option}: expected ")
        assert f"because {operator.removeprefix('gated ')} does not use it, got {SET[option]!r}" in text


def _one_is_wrong(group: Any, operator: str, options: dict[str, Any]) -> str:
    try:
        OPERATORS[operator][0](ranks=mr.Ranks(group, **options))
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("operator", OPERATORS)
def test_all_ranks_raise_where_one_has_an_option_that_is_not_used(operator: str) -> None:
    option = next(name for name in SET if name not in OPERATORS[operator][1])
    options = Each([{}, {option: SET[option]}])
    first, second = on_ranks(2, _one_is_wrong, operator, options)
    assert f"ranks.{option}: expected " in second and first.startswith(f"rank 1: ranks.{option}: expected ")


def _ways(group: Any) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (group.size(),))
    x, weight = (
        torch.linspace(-1, 1, 24).view(6, 4),
        torch.linspace(-2, 1, 20).view(5, 4) * (1 + group.rank()),
    )
    target = torch.tensor([0, 9, 3, 6, 1, 5])
    ways = (
        group,
        mesh,
        mr.Ranks(group),
        mr.Ranks(mesh),
        mr.Ranks(group, classes=10, grad_dtype=torch.float32),
    )
    found = []
    for ranks in ways:
        leaf = x.clone().requires_grad_()
        loss = mr.linear_cross_entropy(leaf, weight, target, ranks=ranks)
        loss.backward()
        assert leaf.grad is not None
        found.append(torch.cat((loss.detach()[None], leaf.grad.flatten())))
    return found


def test_a_group_alone_is_ranks_of_it() -> None:
    for first, *others in on_ranks(2, _ways):
        assert first.abs().sum() > 0 and all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("operator", [name for name in OPERATORS if name not in ("all_fold", "gated mlp")])
def test_the_old_keyword_is_named(operator: str) -> None:
    with pytest.raises(TypeError) as error:
        OPERATORS[operator][0](process_group=None)
    text = (
        f"{operator}() got an unexpected keyword argument 'process_group'; write ranks, which takes a group"
    )
    assert str(error.value).startswith(text)


@pytest.mark.parametrize(
    "module, function",
    (
        (mr.nn.Attention, "attention"),
        (mr.nn.LinearCrossEntropyLoss, "linear_cross_entropy"),
        (mr.nn.LinearDistillationLoss, "linear_distillation"),
    ),
)
def test_modules_say_that_they_compute_on_one_rank(module: Any, function: str) -> None:
    with pytest.raises(TypeError, match=rf"^{function}\(\) got .* 'ranks'; call the function instead"):
        module(ranks=None)
