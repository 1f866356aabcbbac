"""backend_info, explain and the command line: what they say is what runs."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from specimens import DTYPES, ONE_EACH, Specimen, name_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import monoidreduce as mr
from monoidreduce.__main__ import main
from monoidreduce._ops import engine

WITH_KERNELS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]


def split(
    specimen: Specimen, dtype: torch.dtype, device: torch.device
) -> tuple[list[torch.Tensor], dict[str, object]]:
    """The arguments that are positional in the operator's signature, and the others."""
    inputs = specimen.inputs(dtype, device)
    keywords = {name: inputs.pop(name) for name in ("bias", "bias1", "bias2", "mask") if name in inputs}
    return list(inputs.values()), {**keywords, **specimen.options}


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("specimen", WITH_KERNELS, ids=name_of)
def test_the_paths_explained_are_those_counted(
    specimen: Specimen, dtype: torch.dtype, device: torch.device
) -> None:
    tensors, options = split(specimen, dtype, device)
    before = mr._C.path_counts()
    explanation = mr.explain(getattr(mr, specimen.operator), *tensors, **options)
    assert mr._C.path_counts() == before
    assert mr.explain(specimen.operator, *tensors, **options) == explanation

    tensors[0].requires_grad_()
    result = getattr(mr, specimen.operator)(*tensors, **options)
    (result[0] if isinstance(result, tuple) else result).sum().backward()
    after = mr._C.path_counts()
    run = {path for path, count in after.items() if count != before.get(path, 0)}
    assert run == {explanation.forward, explanation.backward}


@pytest.mark.parametrize("specimen", WITH_KERNELS, ids=name_of)
def test_calls_by_name_and_partials_are_explained(specimen: Specimen, device: torch.device) -> None:
    tensors, options = split(specimen, torch.float32, device)
    operator, inputs = getattr(mr, specimen.operator), specimen.inputs(torch.float32, device)
    expected = mr.explain(operator, *tensors, **options)
    backwards = dict(reversed(inputs.items()))
    assert mr.explain(operator, **backwards, **specimen.options) == expected
    assert mr.explain(specimen.operator, **backwards, **specimen.options) == expected
    bound = functools.partial(functools.partial(operator, tensors[0]), **options)
    assert mr.explain(bound, *tensors[1:]) == expected


def test_modules_are_explained(device: torch.device) -> None:
    q = torch.randn(2, 4, 600, 16, device=device)
    module = mr.nn.Attention(causal=True, scale=0.5)
    expected = mr.explain("attention", q, q, q, causal=True, scale=0.5)
    assert mr.explain(module, q, q, v=q) == mr.explain(functools.partial(module, q), q, q) == expected
    x, weight = torch.randn(3, 8, device=device), torch.randn(11, 8, device=device)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    loss = mr.nn.LinearCrossEntropyLoss(workspace=1000, reduction="sum")
    assert mr.explain(loss, x, weight, target).workspace == 1000
    distillation = mr.explain(mr.nn.LinearDistillationLoss(temperature=2.0), x, weight, x, weight)
    assert distillation == mr.explain("linear_distillation", x, weight, x, weight, temperature=2.0)

    class Derived(mr.nn.MLP):
        pass

    mlp = Derived(8, 24).to(device)
    assert mr.explain(mlp, x) == mr.explain("mlp", x, mlp.w1, mlp.w2, bias1=mlp.bias1, bias2=mlp.bias2)


class OtherAttention(mr.nn.Attention):
    def forward(self, q: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return q


@pytest.mark.parametrize(
    ("op", "arguments", "message"),
    [
        (mr.attention, 2, "^attention: missing a required argument: 'v'"),
        (mr.nn.Attention(), 2, "missing a required argument: 'v'"),
        (mr.attention, 0, "missing a required argument: 'q'"),
        (mr.merge_attention, 4, "op: expected one of attention.*got function merge_attention"),
        (mr.fold, 1, "got function fold; fold runs kernels of torch, on any device$"),
        (mr.map_reduce, 1, "^map_reduce: missing a required argument: 'project_fold'"),
        (torch.nn.Linear(8, 8), 1, "op: expected one of .*a module of monoidreduce.nn.*got Linear$"),
        (OtherAttention(), 1, "op: expected one of .*got OtherAttention$"),
        (functools.partial(len), 1, "op: expected one of .* len$"),
        (None, 1, "op: expected one of .*got NoneType$"),
    ],
)
def test_what_is_no_call_of_an_operator_says_so(op: object, arguments: int, message: str) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match=message):
        mr.explain(op, *[q] * arguments)


def test_folds_of_ones_own() -> None:
    """explain says what the fold's own explain does."""

    @mr.statistics
    def token_stats(score, column, label):  # type: ignore[no-untyped-def]
        return dict(total=mr.stat.total(torch.where(column == label, score, 0.0)))

    a, b = torch.randn(3, 8), torch.randn(5, 8)
    expected = token_stats.explain(a, b, label=torch.zeros(3, dtype=torch.int64))
    assert mr.explain(token_stats, a, b) == token_stats.explain(a, b) == expected
    planned = mr.explain(token_stats, a.bfloat16(), b.bfloat16(), hardware="h100")
    assert planned.forward == "statistics_fold/cuda/sm90/bfloat16"
    assert planned.backward == "statistics_local_gradient/cuda/sm90/bfloat16" and planned.deterministic
    assert any("is a program of" in reason and "NVRTC" in reason for reason in planned.reasons)


class OpsThatWrite(TorchDispatchMode):
    """Counts the ops of torch that write tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        self.count += any(t.numel() for t in made) and not (op.is_view or "empty" in op.name())
        return result


def test_map_reduce() -> None:
    """The pairs of slices that project_fold sees, and the ops of torch that a call runs."""
    seen = []
    fold = mr.monoids.LogSumExp()

    def project(a: Any, b: torch.Tensor) -> Any:
        seen.append((len(a[0]), len(b)))
        return fold.State((a[0] * a[1] @ b.T).logsumexp(1))

    a, b = (torch.randn(48, 16), torch.randn(48, 1)), torch.randn(64, 16)
    keep = torch.tensor([[True, False], [True, True], [False, True]])
    call = functools.partial(mr.map_reduce, fold, project, a, b, pairs=keep, a_chunk=16, b_chunk=32)
    found = mr.explain(call)
    seen.clear()
    leaves = [t.requires_grad_() for t in (*a, b)]
    with OpsThatWrite() as forward:
        result = mr.map_reduce(fold, project, a, b, pairs=visited(keep), a_chunk=16, b_chunk=32)
    assert seen.count((16, 32)) == 4 and "after another: 4 in all; slices of a: 3" in found.reasons[1]
    upstream = torch.randn(48)
    with OpsThatWrite() as backward:
        torch.autograd.grad(result.lse, leaves, upstream)
    assert f"are forward {forward.count} and backward {backward.count}" in found.reasons[0]
    assert found.forward == "map_reduce_forward/cpu/torch/float32" and found.deterministic
    planned = mr.explain(call, hardware="h100")
    assert planned.backward == "map_reduce_backward/cuda/torch/float32" and planned.architecture == "sm_90"
    assert planned.reasons[0] == found.reasons[0]
    with pytest.raises(ValueError, match="ranks: expected None"):
        mr.explain(call, ranks="all")
    with pytest.raises(TypeError, match="a: expected a tensor"):
        mr.explain(mr.map_reduce, fold, project, None, b)


def visited(keep: torch.Tensor) -> Callable[[slice, slice], bool]:
    """As a function, whose answers are not read from tensors."""
    answers = keep.tolist()
    return lambda i, j: answers[i.start // 16][j.start // 32]  # type: ignore[no-any-return]


AGAIN = "the backward pass calls project_fold again for each pair, and"
AHEAD = "the forward pass computes the gradient of a for an upstream gradient of 1; "


@pytest.mark.parametrize(
    ("options", "moved", "text", "called"),
    [
        ((), "ab", f"{AGAIN} autograd gives its gradients", {"project_fold": 6}),
        (
            ("project_fold_backward",),
            "b",
            f"{AGAIN} project_fold_backward gives its gradients",
            {"project_fold": 6, "project_fold_backward": 6},
        ),
        (
            ("fused_backward",),
            "ab",
            "fused_backward gives the gradients of each pair, from the final states",
            {"fused_backward": 6},
        ),
        (
            ("forward_gradient",),
            "a",
            f"{AHEAD}the backward pass multiplies it by the upstream gradient, and calls no function",
            {},
        ),
        (("forward_gradient",), "ab", f"{AHEAD}{AGAIN} autograd gives its gradients", {"project_fold": 6}),
        (("forward_gradient",), "b", f"{AGAIN} autograd gives its gradients", {"project_fold": 6}),
        (
            ("forward_gradient", "fused_backward"),
            "ab",
            f"{AHEAD}fused_backward gives the gradients of each pair, from the final states",
            {"fused_backward": 6},
        ),
    ],
)
def test_the_backward_pass_of_map_reduce(
    options: tuple[str, ...], moved: str, text: str, called: dict[str, int]
) -> None:
    """What explain says that it calls is what it calls."""
    calls: Counter[str] = Counter()
    fold = mr.monoids.LogSumExp()

    def project_fold(a: torch.Tensor, b: torch.Tensor) -> Any:
        calls["project_fold"] += 1
        return fold.State((a @ b.T).logsumexp(1))

    def gradients(name: str, a: torch.Tensor, b: torch.Tensor, *states: Any) -> Any:
        calls[name] += 1
        local = states[-1].lse[:, None] * (a @ b.T).softmax(1)
        return local @ b, local.T @ a

    given = {name: name == "forward_gradient" or partial(gradients, name) for name in options}
    a, b = (torch.randn(n, 4).requires_grad_(of in moved) for of, n in (("a", 24), ("b", 32)))
    call = functools.partial(mr.map_reduce, fold, project_fold, a, b, a_chunk=8, b_chunk=16, **given)
    assert mr.explain(call).reasons[2] == text
    result = call()
    calls.clear()
    result.lse.sum().backward()
    assert calls == called


def test_map_reduce_of_integers_has_no_backward_pass() -> None:
    fold = mr.monoids.Sum()
    a, b = (torch.randint(9, (n, 4)) for n in (24, 32))
    found = mr.explain("map_reduce", fold, lambda a, b: fold.State((a @ b.T).sum(1)), a, b)
    assert found.reasons[2] == "there is no backward pass, as neither a nor b holds floating-point numbers"


def test_gradients_of_data_alone_are_folds() -> None:
    @mr.statistics
    def weighted(score, weight):  # type: ignore[no-untyped-def]
        return dict(total=mr.stat.total(score * weight))

    a, b = meta((64, 512), (1000, 512))
    weight = torch.ones(64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = mr.explain(weighted, a, b, row={"weight": weight}, hardware="h100")
    assert found.backward == found.forward == "statistics_fold/cuda/sm90/bfloat16" and found.deterministic
    assert "a gradient is a fold, whose states are combined in a fixed order" in found.reasons


def test_an_option_that_a_module_has_is_not_given_again() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(TypeError, match="causal: expected no value, since the module has one, got False"):
        mr.explain(mr.nn.Attention(causal=True), q, q, q, causal=False)


def test_explanation_of_a_call(device: torch.device) -> None:
    x, weight = torch.randn(3, 8, device=device), torch.randn(11, 8, device=device)
    target = torch.zeros(3, dtype=torch.int64, device=device)
    with mr.workspace(1000):
        explanation = mr.explain("linear_cross_entropy", x, weight, target)
    assert explanation.workspace == 1000
    assert mr.explain("linear_cross_entropy", x, weight, target, workspace=0).workspace == 0
    assert mr.explain("logsumexp_matmul", x, weight).workspace is None
    text = str(explanation)
    assert explanation.forward in text and explanation.backward in text and "1000 bytes" in text
    assert all(reason in text for reason in explanation.reasons)
    with torch.autocast(device.type, torch.bfloat16):
        assert mr.explain("logsumexp_matmul", x, weight).forward.endswith("/bfloat16")


def cpu_path(dtype: torch.dtype) -> str:
    """avx512bf16 is avx512 with instructions for bfloat16."""
    isa = mr._C.cpu_isa()
    return "cpu/avx512" if isa == "avx512bf16" and dtype != torch.bfloat16 else f"cpu/{isa}"


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_the_code_that_runs_on_the_cpu_is_named(dtype: torch.dtype) -> None:
    a, b = torch.randn(3, 8, dtype=dtype), torch.randn(11, 8, dtype=dtype)
    explanation = mr.explain("logsumexp_matmul", a, b)
    assert explanation.forward == f"logsumexp_forward/{cpu_path(dtype)}/{name_of(dtype)}"
    assert explanation.architecture == mr._C.cpu_isa()
    left_to = f"{mr._C.cpu_isa()} has nothing of its own for {name_of(dtype)}"
    assert (left_to in explanation.reasons) == (cpu_path(dtype) != f"cpu/{mr._C.cpu_isa()}")


def panel_rows(dtype: torch.dtype) -> int:
    """Two vectors of the accumulation type."""
    vector = {"avx2": 32, "avx512": 64, "avx512bf16": 64}.get(mr._C.cpu_isa(), 16)
    return 2 * vector // (8 if dtype == torch.float64 else 4)


def places(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of these shapes without memory."""
    return [torch.empty((), dtype=dtype).expand(shape) for shape in shapes]


@pytest.mark.isa
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize(
    ("operator", "shapes", "columns", "backward"),
    [  # `columns` of 192 KiB in float32
        ("attention", [(2, 3, 600, 256)] * 3, 96, (256, 240)),
        ("linear_cross_entropy", [(4, 150, 512), (1000, 512)], 96, (512, 480)),
        ("linear_distillation", [(600, 512), (1000, 512)] * 2, 48, (512, 480)),
        ("mlp", [(600, 512), (1000, 512), (512, 1000)], 48, (256, 240)),
        ("logsumexp_matmul", [(600, 512), (1000, 512)], 96, (512, 480)),
        ("logsumexp_matmul", [(3, 512), (7, 512)], 96, None),
    ],
)
def test_tiles_on_the_cpu(
    operator: str,
    shapes: list[tuple[int, ...]],
    columns: int,
    backward: tuple[int, int] | None,
    dtype: torch.dtype,
) -> None:
    torch.set_num_threads(1)
    tensors = places(dtype, *shapes)
    if operator == "linear_cross_entropy":
        tensors.append(torch.zeros(4, 150, dtype=torch.int64))
    explanation = mr.explain(operator, *tensors)
    operand = 8 if dtype == torch.float64 else 4
    if dtype == torch.bfloat16 and mr._C.cpu_isa() == "avx512bf16":
        operand = 2  # multiplied as it is
    rows = panel_rows(dtype)
    expected = (rows, min(120, columns * 4 // operand)), backward or (rows, 12)
    assert explanation.tiles == expected
    assert "{} x {} forward, {} x {} backward".format(*expected[0], *expected[1]) in str(explanation)


@pytest.mark.usefixtures("threads")
def test_tiles_grow_with_the_threads_on_a_problem() -> None:
    """One thread a head, but all on one after the other where heads share the gradient of a bias."""
    torch.set_num_threads(64)
    q = places(torch.float32, (64, 1, 600, 8))[0]
    bias = torch.zeros(600, 600)
    assert mr.explain("attention", q, q, q, bias=bias).tiles[1] == (256, 240)
    rows = -(-600 // panel_rows(torch.float32)) * panel_rows(torch.float32)
    assert mr.explain("attention", q, q, q, bias=bias.requires_grad_()).tiles[1] == (rows, 240)


def test_calls_on_other_devices_are_refused() -> None:
    q = torch.empty(1, 1, 4, 8, device="meta")
    with pytest.raises(
        ValueError, match=r"tensors: expected tensors on the CPU or on a GPU, or .*, got meta"
    ):
        mr.explain("attention", q, q, q)


def meta(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape in shapes]


@pytest.mark.parametrize(
    ("hardware", "tier", "architecture"),
    [
        ("h100", "sm90", "sm_90"),
        ("h200", "sm90", "sm_90"),
        ("a100", "sm80", "sm_80"),
        ("b200", "sm80", "sm_100"),
    ],
)
def test_a_gpu_that_is_not_there_is_planned_for(hardware: str, tier: str, architecture: str) -> None:
    """Of every operator, of tensors without memory."""
    target = torch.empty(64, dtype=torch.int64, device="meta")
    calls = {
        "attention": meta(*[(2, 8, 1024, 128)] * 3),
        "linear_cross_entropy": [*meta((64, 512), (1000, 512)), target],
        "linear_distillation": meta((64, 512), (1000, 512), (64, 256), (1000, 256)),
        "mlp": meta((4096, 128), (4096, 128), (128, 4096)),
        "logsumexp_matmul": meta((64, 512), (1000, 512)),
    }
    for operator, tensors in calls.items():
        explanation = mr.explain(operator, *tensors, hardware=hardware)
        assert f"/cuda/{tier}/bfloat16" in explanation.forward
        assert f"/cuda/{tier}/bfloat16" in explanation.backward
        assert explanation.architecture == architecture and explanation.tiles is None


@pytest.mark.parametrize(
    ("rows", "columns", "splits"),
    ((64, 10_000, 157), (64 * 132, 10_000, 2), (64 * 264, 10_000, 1), (64, 64, 1)),
)
def test_columns_of_few_rows_on_ordinary_cores(rows: int, columns: int, splits: int) -> None:
    """They are split so that all 132 multiprocessors have work, two blocks each."""
    a, b = (t.float() for t in meta((rows, 128), (columns, 128)))
    explanation = mr.explain("logsumexp_matmul", a, b, hardware="h100")
    said = [reason for reason in explanation.reasons if "few tiles" in reason]
    assert len(said) == (splits > 1)
    assert all(f"; few tiles of 64 rows: columns in {splits} splits" in reason for reason in said)


def test_what_is_planned_is_said() -> None:
    """Few rows, parts, padding and what keeps a call from tensor cores, from the same rules as on a GPU."""
    q, k = meta((8, 32, 1, 128), (8, 8, 32768, 128))
    assert "few rows: tiles of 1 rows of 4 heads, columns in 2 splits" in str(
        mr.explain("attention", q, k, k, hardware="h100")
    )
    x, w1, w2 = meta((16384, 2048), (16384, 2048), (2048, 16384))
    with mr.workspace(64 << 20):
        explanation = mr.explain("mlp", x, w1, w2, hardware="h100")
    assert explanation.workspace == 64 << 20 and "in parts of 2048 rows and 16384 hidden units" in str(
        explanation
    )
    odd = meta((1, 4, 256, 59), (1, 4, 256, 100))
    text = str(mr.explain("attention", odd[0], odd[0], odd[1], hardware="a100"))
    assert text.count("of width 64, padded from 59; of width 104, padded from 100") == 2
    (wide,) = meta((1, 4, 256, 257))
    text = str(mr.explain("attention", wide, wide, wide, hardware="h100"))
    assert "/simt/" in text and "a width is 264, more than 256" in text and "padded" not in text
    (wide,) = meta((1, 4, 256, 512))
    for causal in (False, True):
        text = str(mr.explain("attention", wide, wide, wide, causal=causal, hardware="h100"))
        assert "statistics_fold/cuda/sm90" in text and "0 where a mask excludes a pair" in text
    a, b = torch.randn(3, 8), torch.randn(11, 8)
    assert "the inputs are float32" in str(mr.explain("logsumexp_matmul", a, b, hardware="h100"))


@pytest.mark.parametrize("hardware", ("h100", "a100"))
@pytest.mark.parametrize(
    ("rows", "columns", "width", "narrow"),
    [
        (32768, 32768, 64, True),
        (4096, 4096, 128, True),
        (1, 2048, 8, True),
        (2048, 1, 99, True),
        (4096, 4096, 129, False),  # of 136, padded
        (4095, 4096, 64, False),
        (2049, 2049, 64, False),
        (100, 32768, 64, False),
        (32768, 100, 64, False),
    ],
)
def test_narrow_log_sum_exps(hardware: str, rows: int, columns: int, width: int, narrow: bool) -> None:
    """Where rows and columns are both few or both many, and the mean is kept for a gradient of a."""
    a, b = meta((rows, width), (columns, width))
    mean, gradients = "narrow: folds the mean of b too", "narrow: gradients are folds"

    def said(*names: str) -> tuple[bool, bool]:
        leaves = {"a": a.detach(), "b": b.detach()}
        for name in names:
            leaves[name].requires_grad_()
        explanation = mr.explain("logsumexp_matmul", *leaves.values(), hardware=hardware)
        assert explanation.forward.startswith("logsumexp_forward/cuda/sm")
        return mean in str(explanation), gradients in str(explanation)

    assert said() == said("a", "b") == said("a") == (narrow, narrow)
    assert said("b") == (False, narrow)


@pytest.mark.parametrize(
    ("hardware", "rows", "columns", "width", "kept"),
    [
        ("h100", 8192, 128256, 4096, 22528),
        ("h100", 4096, 4096, 1024, 4096),
        ("h100", 4096, 4096, 1016, 0),  # so few terms are summed again in less time
        ("h100", 8192, 16384, 504, 0),
        ("h100", 100, 45000, 64, 0),
        ("a100", 8192, 128256, 4096, None),
    ],
)
def test_what_a_log_sum_exp_keeps(
    hardware: str, rows: int, columns: int, width: int, kept: int | None
) -> None:
    a, b = meta((rows, width), (columns, width))
    text = str(mr.explain("logsumexp_matmul", a, b, hardware=hardware))
    said = "a forward pass that will be differentiated keeps local gradients of"
    assert (said in text) == (f"{said} {kept} of {columns} columns" in text) == (kept is not None)


@pytest.mark.parametrize(("workspace", "kept"), ((5 * 4096 * 8192, 8192), (5 * 4096 * 8192 - 1, None)))
def test_a_log_sum_exp_in_planes_keeps_all_or_nothing(workspace: int, kept: int | None) -> None:
    a, b = (torch.empty(n, 1024, device="meta") for n in (4096, 8192))
    with mr.workspace(workspace), mr.float32("emulated"):
        explanation = mr.explain("logsumexp_matmul", a, b, hardware="h100")
    assert "/planes/" in explanation.forward and "/planes/" in explanation.backward
    assert (f"keeps local gradients of {kept} of 8192 columns" in str(explanation)) == (kept is not None)


def test_a_narrow_log_sum_exp_needs_no_asking_for_the_same_bits() -> None:
    a, b = meta((4096, 64), (4096, 64))
    before = mr.explain("logsumexp_matmul", a, b, hardware="h100")
    assert before.deterministic and "a gradient is summed by one block each" in str(before)
    torch.use_deterministic_algorithms(True)
    try:
        asked = mr.explain("logsumexp_matmul", a, b, hardware="h100")
    finally:
        torch.use_deterministic_algorithms(False)
    assert asked.backward == "logsumexp_backward/cuda/sm90/deterministic/bfloat16"


@pytest.mark.parametrize(
    ("width", "names", "said"),
    [
        (128, "q", "the gradient of q alone"),
        (64, "k", "the gradients of k and v alone"),
        (128, "kv", "the gradients of k and v alone"),
        (256, "v", "the gradient of v alone"),
        (256, "qk", "the gradients of q and k alone"),
        (128, "qv", None),
        (128, "qkv", None),
        (128, "", None),
    ],
)
def test_gradients_of_attention_that_are_computed(width: int, names: str, said: str | None) -> None:
    leaves = meta(*[(2, 16, 4096, width)] * 3)
    for name, t in zip("qkv", leaves, strict=True):
        t.requires_grad_(name in names)
    texts = {gpu: str(mr.explain("attention", *leaves, hardware=gpu)) for gpu in ("h100", "a100")}
    assert "alone" not in texts["a100"]
    assert said in texts["h100"] if said else "alone" not in texts["h100"]
    (bias,) = meta((4096, 4096))
    assert "alone" not in str(mr.explain("attention", *leaves, bias=bias, hardware="h100"))


def test_a_bias_by_rows_takes_no_call_from_tensor_cores() -> None:
    """It leaves the weights as they are, so the kernels never see it."""
    (wide,), (bias,) = meta((1, 4, 256, 512)), meta((256, 1))
    found = mr.explain("attention", wide, wide, wide, bias=bias, hardware="h100")
    assert found.forward == "statistics_fold/cuda/sm90/bfloat16"


def test_the_options_of_functions_that_modify_scores_are_checked() -> None:
    (q,) = meta((1, 1, 64, 64))
    with pytest.raises(ValueError, match="softcap: expected"):
        mr.explain("attention", q, q, q, softcap=-5.0, mask_mod=lambda b, h, i, j: i >= j, hardware="h100")


def test_where_there_is_nothing_to_fold_torch_fills_the_results() -> None:
    q, k = meta((1, 1, 64, 64), (1, 1, 0, 64))
    found = mr.explain("attend", q, k, k, weight=torch.sigmoid, hardware="h100")
    assert found.forward == "modified_attention_forward/cuda/torch/bfloat16" and found.deterministic
    assert "there is nothing to fold: torch fills the results" in found.reasons


def test_tensors_on_several_devices_are_refused() -> None:
    q, (k,) = torch.randn(1, 1, 4, 8), meta((1, 1, 4, 8), dtype=torch.float32)
    for hardware in (None, "h100"):
        with pytest.raises(ValueError, match="k: expected a tensor on cpu as q, got meta"):
            mr.explain("attention", q, k, q, hardware=hardware)


def test_copies_by_alignment_and_strides() -> None:
    """As kernels would make them of these tensors, which may be views at any address."""
    (q,), (memory,) = meta((1, 4, 512, 64)), meta((4 * 512 * 64 + 1,))
    shifted, transposed = memory[1:].view(q.shape), meta((1, 4, 64, 512))[0].mT
    for other in (shifted, transposed):
        for mods in ({}, {"mask_mod": lambda b, h, i, j: i >= j}):
            reasons = mr.explain("attention", q, other, q, **mods, hardware="h100").reasons
            assert [reason.split()[0] for reason in reasons if "is copied" in reason] == ["k"]


def test_nothing_of_the_caller_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither tensors nor the mode of autograd, nor what this thread's ops call; and no target is read."""
    monkeypatch.setenv("MONOIDREDUCE_DEBUG", "1")
    x, weight = (torch.randn(9, 8, requires_grad=True) for _ in range(2))
    target = torch.full((9,), 1000)
    versions = [t._version for t in (x, weight, target)]
    of_thread = [dict(vars(each)) for each in (engine._C, engine.streams, engine.user_kernels)]
    for hardware in (None, "h100"):
        mr.explain("linear_cross_entropy", x, weight, target, hardware=hardware)
    assert versions == [t._version for t in (x, weight, target)] and x.grad is weight.grad is None
    assert torch.is_grad_enabled() and x.requires_grad
    assert [vars(each) for each in (engine._C, engine.streams, engine.user_kernels)] == of_thread


def refusal(call: Callable[[], object]) -> type[Exception] | None:
    try:
        call()
    except Exception as error:
        return type(error)
    return None


def calls_to_refuse() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Calls whose arguments are changed one by one, by name."""

    @mr.statistics
    def fold(score, column, label, weight):  # type: ignore[no-untyped-def]
        return dict(x=mr.stat.total(torch.where(column == label, score * weight, 0.0)))

    new, target = torch.randn, torch.randint(7, (5,))
    head = {"x": new(5, 8), "weight": new(7, 8)}
    qkv = {"q": new(1, 2, 4, 8), "k": new(1, 2, 6, 8), "v": new(1, 2, 6, 8)}
    heads = {**head, "teacher_x": new(5, 9), "teacher_weight": new(7, 9)}
    losses = {"beta": 0.5, "temperature": 1.0, "reduction": "mean", "teacher_grad": False}
    mlp = {"x": new(5, 8), "w1": new(7, 8), "w2": new(8, 7), "activation": "silu", "bias1": new(7)}
    return {
        "attention": (
            mr.attention,
            {**qkv, "scale": 1.0, "window": None, "bias": new(4, 6), "sinks": new(2)},
        ),
        "attention by mods": (mr.attention, {**qkv, "mask_mod": None, "softcap": None, "return_lse": False}),
        "attend": (mr.attend, {**qkv, "weight": torch.sigmoid, "normalized": False, "causal": False}),
        "cross entropy": (
            mr.linear_cross_entropy,
            {**head, "target": target, "class_weight": new(7), "label_smoothing": 0.1, "ignore_index": -100},
        ),
        "distillation": (mr.linear_distillation, {**heads, **losses, "mask": target > 0, "workspace": None}),
        "jsd": (
            mr.linear_distillation,
            {**heads, **losses, "loss": "jsd", "bias": new(7), "target": target, "hard_weight": 0.5},
        ),
        "log probabilities": (
            mr.linear_log_probs,
            {**head, "target": target, "temperature": torch.ones(5), "top1": False, "softcap": None},
        ),
        "gated mlp": (mr.mlp, {**mlp, "gate": new(7, 8), "gate_bias": new(7)}),
        "log-sum-exp": (mr.logsumexp_matmul, {"a": new(5, 8), "b": new(7, 8), "scale": 1.0}),
        "fold": (
            fold,
            {"a": new(5, 8), "b": new(7, 8), "label": target, "row": {"weight": new(5)}, "scale": 1.0},
        ),
    }


def other_values(given: object) -> list[Any]:
    numbers = [3, -1, math.nan, 1e40, True, "x", (1, -2), torch.tensor(0.5), torch.tensor(3)]
    tensors = [torch.ones(3), torch.ones(5, requires_grad=True), torch.ones(7, requires_grad=True)]
    tensors += [torch.tensor(0.5, requires_grad=True), torch.tensor(0.5, device="meta")]
    tensors += [torch.ones(5, device="meta"), torch.ones(5, dtype=torch.int32)]
    values = [*numbers, *tensors, lambda *a: a[-1] >= a[-2], {"weight": torch.ones(4)}]
    if isinstance(given, torch.Tensor):
        values += [given[:-1], given[None], given.to("meta"), given.double(), given.int(), given.to_sparse()]
        values += [given[..., :-1], given[:0]]
        values += [given.clone().requires_grad_()] if given.is_floating_point() else []
    return values


@pytest.mark.parametrize("which", calls_to_refuse())
def test_what_a_call_refuses_explain_refuses(which: str) -> None:
    """With an error of the same type. Of the values of tensors explain knows nothing."""
    function, given = calls_to_refuse()[which]
    told = []
    for name in given.keys() - {"row"}:
        for value in other_values(given[name]):
            call = given | {name: value}
            found, expected = (refusal(partial(f, **call)) for f in (partial(mr.explain, function), function))
            if found is not expected is not IndexError:
                told.append(f"{name}={str(value)[:50]}: {found} in place of {expected}")
    assert not told


def test_a_gradient_that_a_call_refuses() -> None:
    """Where autograd records the call. Elsewhere a temperature may require a gradient."""
    x, weight, target = torch.randn(5, 8), torch.randn(7, 8), torch.zeros(5, dtype=torch.int64)
    call = partial(mr.linear_log_probs, x, weight, target, temperature=torch.ones(5, requires_grad=True))
    with pytest.raises(ValueError, match="temperature: expected a tensor that requires no gradient"):
        mr.explain(call)
    with torch.no_grad():
        call()
        mr.explain(call)


def test_a_temperature_on_the_device_of_the_tokens() -> None:
    """Kernels read it there, so nobody needs its value."""
    x, weight = meta((64, 512), (1000, 512))
    target, temperature = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape, dtype in (((64,), torch.int64), ((), torch.float32))
    )
    found = mr.explain("linear_log_probs", x, weight, target, temperature=temperature, hardware="h100")
    assert found.forward == "log_probs_forward/cuda/sm90/bfloat16"


def test_captured_tensors_are_where_the_call_is() -> None:
    q, slopes = torch.randn(1, 2, 8, 16), torch.randn(2)

    @mr.statistics
    def fold(score, row):  # type: ignore[no-untyped-def]
        return dict(x=mr.stat.total(score * slopes[row]))

    call = partial(mr.attention, q, q, q, score_mod=lambda s, b, h, i, j: s + slopes[h])
    fold_call = partial(fold, q[0, 0, :2], q[0, 1])
    assert mr.explain(call).forward.startswith("modified_attention_forward/cpu/")
    assert fold.explain(*fold_call.args).forward.startswith("statistics_forward/cpu/")
    slopes = slopes.to("meta")
    for refused in (call, partial(mr.explain, call), fold_call, partial(fold.explain, *fold_call.args)):
        with pytest.raises(ValueError, match=r"captured tensor.*on cpu.*got meta"):
            refused()


def test_hardware_is_a_gpu() -> None:
    (q,) = meta((1, 1, 4, 8))
    with pytest.raises(ValueError, match=r"hardware: expected one of .*got 'h1000'"):
        mr.explain("attention", q, q, q, hardware="h1000")
    with pytest.raises(ValueError, match="hardware: expected a GPU of NVIDIA's, got v5p"):
        mr.explain("attention", q, q, q, hardware="v5p")


def test_no_tiles_are_named_on_a_gpu(device: torch.device) -> None:
    a, b = torch.randn(3, 8, device=device), torch.randn(11, 8, device=device)
    explanation = mr.explain("logsumexp_matmul", a, b)
    assert (explanation.tiles is None) == ("tiles" not in str(explanation)) == (device.type == "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_determinism_on_a_gpu_is_as_asked() -> None:
    x, weight = torch.randn(3, 8, device="cuda"), torch.randn(11, 8, device="cuda")
    assert not mr.explain("logsumexp_matmul", x, weight).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert mr.explain("logsumexp_matmul", x, weight).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_backend_info() -> None:
    info = mr.backend_info()
    assert info["version"] == mr.__version__ == info["build"]["version"]
    assert info["torch"] == torch.__version__
    assert info["cpu"]["isa"] in info["cpu"]["isas"] and info["cpu"]["threads"] == torch.get_num_threads()
    assert set(info["cpu"]["isas"]) <= set(info["build"]["cpu_isas"])
    assert set(info["paths"]) == {specimen.operator for specimen in WITH_KERNELS}
    for paths in info["paths"].values():
        assert paths["cpu"] == {name_of(dtype): cpu_path(dtype) for dtype in DTYPES}
        assert (paths["cuda"] is not None) == (info["build"]["cuda"] and torch.cuda.is_available())
    if not torch.cuda.is_available():
        assert info["cuda_devices"] == []


def test_info(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    info = mr.backend_info()
    assert mr.__version__ in printed and info["build"]["compiler"] in printed
    for operator, paths in info["paths"].items():
        (line,) = (line for line in printed.splitlines() if line.startswith(operator + " "))
        assert all(f"{dtype} {path}" in line for dtype, path in paths["cpu"].items())


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--includes"], [mr.get_include()]),
        (["--cmakedir"], [mr.get_cmake_dir()]),
        (["--includes", "--cmakedir"], [mr.get_include(), mr.get_cmake_dir()]),
    ],
)
def test_folders(flags: list[str], printed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 0
    assert capsys.readouterr().out.splitlines() == printed


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n{command} " in printed for command in ("info", "demo", "bench"))
