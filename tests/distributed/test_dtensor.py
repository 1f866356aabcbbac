"""Modules under FSDP2, DDP, VocabParallel and MLPParallel, and operators of DTensors: as in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import on_ranks
from torch import Tensor, nn

import monoidreduce as mr

ROWS, WIDTH, CLASSES = 24, 16, 41
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3}


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.head = mr.nn.LinearCrossEntropyHead(
            WIDTH, CLASSES, bias=True, dtype=torch.float64, **OPTIONS, **options
        )

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        return self.head(torch.tanh(self.body(x)), target)


def _data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(CLASSES, (ROWS,), generator=generator)
    target[::5] = -100
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator), target


def _alone() -> tuple[Tensor, dict[str, Tensor]]:
    model = Model(reduction="sum")
    loss = model(*_data())
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _whole(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _wrapped(group: Any, wrapper: str, reshard: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Each rank has other tokens; gradients are averaged."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    model: Any = Model(reduction="sum")
    x, target = (t.chunk(group.size())[group.rank()] for t in _data())
    mesh = DeviceMesh.from_group(group, "cpu")
    if wrapper == "fsdp2":
        fully_shard(model.head, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    loss = model(x, target)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=group)
    of = model.module if wrapper == "ddp" else model
    return total, {name: _whole(p.grad) * group.size() for name, p in of.named_parameters()}


def _full_weight(group: Any) -> Tensor:
    """The gradient of a sharded weight that the loss reads whole, where each rank has other tokens."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Partial, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    x, target = (t.chunk(group.size())[group.rank()] for t in _data())
    weight = nn.Parameter(distribute_tensor(Model().head.weight.detach(), mesh, [Shard(0)]))
    whole = weight.full_tensor(grad_placements=[Partial()])  # type: ignore[attr-defined]
    mr.linear_cross_entropy(x, whole, target, reduction="sum").backward()
    return _whole(weight.grad)


def test_a_weight_that_is_read_whole_has_the_gradient_of_all_tokens() -> None:
    """If it is told that ranks have partial sums, as docs/distributed.md says."""
    weight = Model().head.weight.detach().requires_grad_()
    x, target = _data()
    mr.linear_cross_entropy(x, weight, target, reduction="sum").backward()
    for found in on_ranks(2, _full_weight):
        torch.testing.assert_close(found, weight.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("wrapper, reshard", (("fsdp2", True), ("fsdp2", False), ("ddp", False)))
def test_head_in_wrappers(wrapper: str, reshard: bool) -> None:
    _compare(on_ranks(2, _wrapped, wrapper, reshard))


def _compare(found: list[tuple[Tensor, dict[str, Tensor]]]) -> None:
    loss, gradients = _alone()
    for total, of_rank in found:
        torch.testing.assert_close(total, loss, rtol=1e-12, atol=1e-12)
        assert of_rank.keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(of_rank[name], gradient, rtol=1e-10, atol=1e-12)


def _vocab_parallel(group: Any, with_logits: bool) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    model = Model(reduction="sum")
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(model.head, mesh, mr.distributed.VocabParallel())
    x, target = _data()
    if with_logits:
        return model(x).detach()
    loss = model(x, target)
    loss.backward()
    return loss.detach(), {name: _whole(p.grad) for name, p in model.named_parameters()}


@pytest.mark.parametrize("ranks", (2, 3))
def test_vocab_parallel_head(ranks: int) -> None:
    _compare(on_ranks(ranks, _vocab_parallel, False))
    x, _ = _data()
    for logits in on_ranks(ranks, _vocab_parallel, True):
        torch.testing.assert_close(logits, Model()(x).detach(), rtol=1e-12, atol=1e-12)


def _of_another_module(group: Any) -> str:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import parallelize_module

    try:
        parallelize_module(
            nn.Linear(3, 4), DeviceMesh.from_group(group, "cpu"), mr.distributed.VocabParallel()
        )
    except TypeError as error:
        return str(error)
    return ""


def test_vocab_parallel_is_for_the_head() -> None:
    assert on_ranks(2, _of_another_module) == ["module: expected a LinearCrossEntropyHead, got Linear"] * 2


def _mlp_parallel(group: Any, gated: bool, placed: bool) -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import parallelize_module

    module = _mlp(gated)
    mesh = DeviceMesh.from_group(group, "cpu")
    parallelize_module(module, mesh, mr.distributed.MLPParallel())
    x = _data()[0].requires_grad_()
    found = module(DTensor.from_local(x, mesh, [Replicate()]) if placed else x)
    _whole(found).square().sum().backward()
    widths = [tuple(p.to_local().shape) for p in module.parameters()]
    return widths, [_whole(found).detach(), x.grad, *(_whole(p.grad) for p in module.parameters())]


def _mlp(gated: bool) -> mr.nn.MLP:
    torch.manual_seed(4)
    return mr.nn.MLP(WIDTH, 7, gated=gated, activation="silu", dtype=torch.float64)


@pytest.mark.parametrize("gated", (False, True))
@pytest.mark.parametrize("ranks, placed", ((2, False), (2, True), (3, False)))
def test_mlp_parallel(ranks: int, placed: bool, gated: bool) -> None:
    module, x = _mlp(gated), _data()[0].requires_grad_()
    expected = module(x)
    expected.square().sum().backward()
    gradients = [p.grad for p in module.parameters()]
    for rank, (widths, found) in enumerate(on_ranks(ranks, _mlp_parallel, gated, placed)):
        own = {2: (4, 3), 3: (3, 3, 1)}[ranks][rank]  # of 7 hidden units
        assert widths[:2] == [(own, WIDTH), (own,)] and widths[2] == (WIDTH, own)
        for value, of_one in zip(found, [expected.detach(), x.grad, *gradients], strict=True):
            torch.testing.assert_close(value, of_one, rtol=1e-10, atol=1e-12)


def _all_operators(group: Any, rows: str, columns: str) -> list[tuple[str, Tensor, Tensor]]:
    """Results and gradients of DTensors, beside those of one device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))

    def random(*shape: int, seed: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    target = torch.arange(24).view(6, 4) % CLASSES
    of_rows: dict[str, Tensor] = {
        "x": random(6, 4, WIDTH, seed=0),
        "a": random(6, 4, WIDTH, seed=0),
        "teacher_x": random(6, 4, 5, seed=1),
        "target": target,
        "mask": target % 3 > 0,
        "kept": mr.pack_classes(
            torch.stack((target, target * 7 % CLASSES, target * 5 % CLASSES), -1), CLASSES
        ),
        "temperature": 0.5 + target / 20,
    }
    of_columns = {
        "weight": random(CLASSES, WIDTH, seed=2),
        "b": random(CLASSES, WIDTH, seed=2),
        "bias": random(CLASSES, seed=3),
        "teacher_weight": random(CLASSES, 5, seed=4),
        "w1": random(7, WIDTH, seed=5),
        "w2": random(3, 7, seed=6),
        "bias1": random(7, seed=7),
        "bias2": random(3, seed=8),
        "gate": random(7, WIDTH, seed=9),
    }
    calls: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "log_probs": (mr.linear_log_probs, "x weight target bias temperature", {"entropy": True}),
        "kept": (mr.linear_log_probs, "x weight target kept", {"entropy": True}),
        "distillation": (mr.linear_distillation, "x weight teacher_x teacher_weight mask", {}),
        "each": (mr.linear_distillation, "x weight teacher_x teacher_weight", {"reduction": "none"}),
        "cross_entropy": (mr.linear_cross_entropy, "x weight target bias", {"return_lse": True}),
        "lse": (mr.logsumexp_matmul, "a b", {"scale": 0.3}),
        "mlp": (mr.mlp, "x w1 w2 bias1 bias2", {}),
        "gated": (mr.mlp, "x w1 w2 gate bias2", {"activation": "silu"}),
    }

    def placed(name: str, t: Tensor) -> Any:
        if name in of_rows:
            how = [Replicate() if c == "R" else Shard(int(c)) for c in rows]
        else:
            axis = {"w2": 1}.get(name, 0)
            how = [Shard(axis) if c == "S" and name != "bias2" else Replicate() for c in columns]
        return distribute_tensor(t, mesh, how)

    found = []
    for name, (function, arguments, options) in calls.items():
        plain = {n: (of_rows | of_columns)[n].clone() for n in arguments.split()}
        wanted = [n for n, t in plain.items() if t.is_floating_point() and n not in ("temperature",)]
        wanted = [n for n in wanted if not n.startswith("teacher")]
        both = []
        for tensors in (plain, {n: placed(n, t) for n, t in plain.items()}):
            for n in wanted:
                tensors[n].requires_grad_()
            results = function(**tensors, **options)
            results = [r for r in results if r is not None] if isinstance(results, tuple) else [results]
            whole = [_whole(r) for r in results]
            sum((r * r.detach().cos()).sum() for r in whole).backward()
            both.append([*(r.detach() for r in whole), *(_whole(tensors[n].grad) for n in wanted)])
        found += [(name, ours, of_one) for of_one, ours in zip(*both, strict=True)]
    return found


@pytest.mark.parametrize(
    "rows, columns", (("RR", "RS"), ("0R", "RS"), ("01", "RS"), ("01", "SR"), ("0R", "RR"))
)
def test_all_operators_of_dtensors(rows: str, columns: str) -> None:
    for of_rank in on_ranks(4, _all_operators, rows, columns):
        for name, value, expected in of_rank:
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-11, msg=name)


@mr.statistics
def _total(score: Tensor) -> dict[str, Tensor]:
    return dict(sum=mr.stat.total(score))


def _refused(group: Any) -> list[str]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")

    def placed(t: Tensor, placement: Any) -> Any:
        return distribute_tensor(t, mesh, [placement])

    x, weight, target = torch.randn(4, 3), torch.randn(6, 3), torch.arange(4)
    q = placed(torch.randn(1, 4, 6, 8), Shard(1))
    calls = {
        "attention": lambda: mr.attention(q, q, q),
        "varlen": lambda: mr.attention_varlen(q[0], q[0], q[0], torch.tensor([0, 4])),
        "replicated": lambda: mr.linear_log_probs(x, placed(weight, Replicate()), target),
        "width": lambda: mr.logsumexp_matmul(placed(x, Replicate()), placed(weight, Shard(1))),
        "mlp": lambda: mr.mlp(*(placed(t, Shard(0)) for t in (x, weight, torch.randn(3, 6)))),
        "statistics": lambda: _total(x, placed(weight, Shard(0))),
        "jsd": lambda: mr.linear_distillation(x, placed(weight, Shard(0)), x, weight, loss="jsd"),
        "captured": lambda: mr.attention(
            *[torch.randn(1, 2, 4, 8)] * 3, score_mod=lambda s, b, h, i, j: s * q[0, h, i, 0]
        ),
        "mask": lambda: mr.block_mask(lambda b, h, i, j: q[0, h, i, 0] > 0, None, 2, 4, 4),
    }  # fmt: skip
    found = []
    for call in calls.values():
        try:
            call()
        except TypeError as error:
            found.append(str(error))
    return found


def test_refusals_name_the_operator_the_argument_and_the_way_out() -> None:
    for texts in on_ranks(2, _refused):
        starts = (
            "q: expected a plain tensor in attention, such as q.to_local()",
            "q: expected a plain tensor in attention_varlen, such as q.to_local()",
            "x: expected a DTensor on the mesh of weight",
            "b: expected a DTensor with Shard(0) on one dimension of its mesh",
            "w2: expected placements (Shard(dim=1),) in mlp, as w1 has (Shard(dim=0),)",
            "b: expected a plain tensor in _total",
            "weight: expected a plain tensor in linear_distillation",
            "a captured tensor: expected a plain tensor, such as t.to_local()",
            "a captured tensor: expected a plain tensor, such as t.to_local()",
        )
        assert len(texts) == len(starts)
        for text, start in zip(texts, starts, strict=True):
            assert start in text and "lace" in text, text


def _of_dtensors(group: Any, placements: Any, reduction: str, wrong: str) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def placed(names: str) -> list[Any]:
        return [Shard(0) if name == "S" else Replicate() for name in names]

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    torch.manual_seed(3)
    weight, bias = torch.randn(CLASSES, WIDTH).double(), torch.randn(CLASSES).double()
    x, target = _data()
    leaves = [
        distribute_tensor(t, mesh, placed(how)).requires_grad_()
        for t, how in ((x, placements), (weight, "RS"), (bias, "RS"))
    ]
    labels = distribute_tensor(target, mesh, placed(placements))
    given = {"x": leaves[0], "weight": leaves[1], "target": labels, "bias": leaves[2], "reduction": reduction}
    if wrong:
        changed = {"plain x": {"x": x}, "weight": {"weight": distribute_tensor(weight, mesh, placed("SS"))}}
        changed |= {
            "target": {"target": distribute_tensor(target, mesh, placed("RS"))},
            "group": {"ranks": group},
        }
        try:
            mr.linear_cross_entropy(**given | changed[wrong])
        except TypeError as error:
            return str(error)
        return ""
    found: Any = mr.linear_cross_entropy(**given, **OPTIONS)
    upstream = torch.linspace(1, 2, ROWS).double() if reduction == "none" else torch.tensor(1.5).double()
    whole = found.full_tensor()
    whole.backward(upstream)
    plain = [t.clone().requires_grad_() for t in (x, weight, bias)]
    expected = mr.linear_cross_entropy(
        plain[0], plain[1], target, bias=plain[2], reduction=reduction, **OPTIONS
    )
    expected.backward(upstream)
    return [(whole.detach(), expected.detach())] + [
        (a.grad.full_tensor(), b.grad) for a, b in zip(leaves, plain, strict=True)
    ]


@pytest.mark.parametrize("reduction", ("none", "sum", "mean"))
@pytest.mark.parametrize("placements", ("SS", "SR", "RS", "RR"))
def test_dtensors_on_a_mesh_of_two_dimensions(placements: str, reduction: str) -> None:
    """x split over rows, columns, both or neither."""
    for of_rank in on_ranks(4, _of_dtensors, placements, reduction, ""):
        for value, expected in of_rank:
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "wrong, expected",
    (
        ("plain x", "x: expected a DTensor on the mesh of weight"),
        ("weight", "weight: expected a DTensor with Shard(0) on one dimension"),
        ("target", "target: expected placements"),
        ("group", "ranks: expected None, where an argument is a DTensor"),
    ),
)
def test_wrong_dtensors(wrong: str, expected: str) -> None:
    assert all(text.startswith(expected) for text in on_ranks(4, _of_dtensors, "SR", "sum", wrong))
