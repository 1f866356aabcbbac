"""Distillation with the loss "jsd" from stored scores: layouts; the op, with kernels that the host runs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from host_jsd import Kernels, compiled
from hypothesis import given
from hypothesis import strategies as st
from specimens import Inputs, distillation_inputs
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops import stored_scores
from monoidreduce._ops.slices import TILE_COLUMNS
from monoidreduce._ops.stored_scores import Layout

CPU = torch.device("cpu")
BF16 = torch.bfloat16


# Layouts


@given(
    rows=st.integers(1, 5000),
    classes=st.integers(1, 20000),
    width=st.integers(1, 500).map(lambda n: 8 * n),
    workspace=st.integers(0, 1 << 28),
    keeps=st.booleans(),
)
def test_layout(rows: int, classes: int, width: int, workspace: int, keeps: bool) -> None:
    """All is within the workspace, or a tile; and no gradient is written where a panel still lies."""
    layout = Layout.of(rows, classes, width, workspace, keeps)
    assert 0 < layout.at_once <= rows and layout.pitch % 8 == 0 and 0 <= layout.pitch - classes < 8
    least = 8 * max(min(rows, 128) * layout.pitch, rows * min(256, classes + 7) if layout.again else 0)
    assert 4 * layout.floats(rows) <= max(workspace, least)
    if not keeps or layout.at_once == rows:
        assert not (layout.panels or layout.own.stop or layout.again)
        return
    parts = [layout.own, *layout.panels]  # follow one another, up to the last class
    assert [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]] and parts[-1].stop == classes
    assert all(p.start % TILE_COLUMNS == 0 or p.start == p.stop for p in parts)
    assert (layout.again > 0) == (layout.own.start > 0) and layout.again % TILE_COLUMNS in (0, layout.again)
    sizes = [rows * -(-(p.stop - p.start) // 8) * 8 for p in layout.panels]
    assert sum(sizes) <= classes * width and max(sizes, default=0) <= 4 * layout.at_once * layout.pitch
    for n, part in enumerate(layout.panels):  # those before it lie below
        assert sum(sizes[:n]) <= part.start * width


def test_layout_of_a_model() -> None:
    """More than half of the classes' scores are computed once, in the default workspace."""
    layout = Layout.of(4096, 128256, 2048, 352 << 20, True)
    assert layout.at_once == 256 and len(layout.panels) == 2
    assert layout.own.start < 0.42 * 128256 and 4 * layout.floats(4096) <= 352 << 20


# The op


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory.mktemp("jsd"))


@pytest.fixture
def kernels(library: Any, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """In place of a GPU's; then a call takes them on the CPU."""
    found = Kernels(library)
    found.put_in_place(monkeypatch)
    first = stored_scores.obstacle

    def obstacle(*arguments: Any) -> str | None:
        why = first(*arguments)
        return None if why == "only kernels for Hopper store scores" else why

    monkeypatch.setattr(stored_scores, "obstacle", obstacle)
    return found


def inputs_of(rows: int = 300, classes: int = 1111, **options: Any) -> Inputs:
    return distillation_inputs(rows, classes, 24, 40, dtype=BF16, device=CPU, **options)


def check(inputs: Inputs, options: dict[str, Any], **how: Any) -> dict[str, Tensor]:
    how = {"differentiate": ["x", "weight"]} | how
    return check_operator(
        "linear_distillation", inputs, {"loss": "jsd"} | options, function=mr.linear_distillation, **how
    )


# Bytes: all rows at once; slices of 256 rows, which keep some local gradients, or of 128, the fewest.
WORKSPACES = (1 << 30, 8 * 1112 * 256, 8 * 1112 * 290, 0)


@pytest.mark.parametrize("workspace", WORKSPACES)
@pytest.mark.parametrize("mask", (False, True), ids=("all", "masked"))
@pytest.mark.parametrize("reduction", ("mean", "sum"))
def test_slices(reduction: str, mask: bool, workspace: int, kernels: Kernels) -> None:
    """Of rows, and of classes whose scores are computed again."""
    check(inputs_of(mask=mask), {"reduction": reduction, "workspace": workspace, "temperature": 1.7})
    layout = Layout.of(300, 1111, 24, workspace, True)
    slices = -(-300 // layout.at_once)
    again = -(-layout.own.start // layout.again) if layout.again else 0
    assert kernels.launched.count("jsd_rows") == slices and kernels.launched.count("jsd_gradient") == again
    assert kernels.launched.count("score_product") == 2 * (slices + again)


def test_panels(kernels: Kernels) -> None:
    """Each is moved away before the gradient of its classes is written over others."""
    assert len(Layout.of(600, 600, 1032, 0, True).panels) == 2
    check(distillation_inputs(600, 600, 1032, 40, dtype=BF16, device=CPU), {"workspace": 0})
    assert kernels.launched[-2:] == ["columns_product"] * 2 and "jsd_gradient" not in kernels.launched


@pytest.mark.parametrize("classes", (1, 7, 256, 300, 5000))
@pytest.mark.parametrize("rows", (1, 129, 300))
def test_sizes(rows: int, classes: int, kernels: Kernels) -> None:
    check(inputs_of(rows, classes), {"workspace": 8 * (classes + 7) * 128})
    assert "jsd_rows" in kernels.launched


@pytest.mark.parametrize("beta", (0.1, 0.5, 0.9))
@pytest.mark.parametrize("temperature", (0.3, 4.0))
def test_numbers(temperature: float, beta: float, kernels: Kernels) -> None:
    check(inputs_of(300, 700), {"beta": beta, "temperature": temperature, "workspace": 0})


@pytest.mark.parametrize("wanted", (["x"], ["weight"]), ids=("x", "weight"))
def test_one_gradient(wanted: list[str], kernels: Kernels) -> None:
    check(inputs_of(), {"workspace": 0}, differentiate=wanted)
    assert ("columns_product" in kernels.launched) == ("weight" in wanted)


def test_no_gradient(kernels: Kernels) -> None:
    check(inputs_of(), {"workspace": 0}, differentiate=[])
    assert set(kernels.launched) == {"score_product", "jsd_rows"}


def test_no_token_counts(kernels: Kernels) -> None:
    """Also where excluded tokens hold NaN."""
    inputs = inputs_of()
    inputs["mask"] = torch.zeros(300, dtype=torch.bool)
    inputs["x"][3], inputs["teacher_x"][5] = math.nan, math.inf
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    loss = mr.linear_distillation(**inputs, loss="jsd", workspace=0)
    assert loss == 0 and not any(g.any() for g in torch.autograd.grad(loss, leaves))


def test_ignored_targets_are_a_mask(kernels: Kernels) -> None:
    inputs = inputs_of()
    inputs["target"] = torch.randint(0, 1111, (300,))
    inputs["target"][::3] = -100
    check(inputs, {"workspace": 0})
    assert "jsd_rows" in kernels.launched


def test_a_graph_that_is_kept(kernels: Kernels) -> None:
    """Two backward passes have the same gradients, the first in memory of their own."""
    inputs = inputs_of()
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    loss = mr.linear_distillation(**inputs, loss="jsd")
    kept = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
    assert not kernels.scaled_in_place
    first = [g.clone() for g in kept]
    again = torch.autograd.grad(3 * loss, leaves)
    for found, before, now in zip(kept, first, again, strict=True):
        assert torch.equal(found, before) and torch.equal(now, before)


def test_compiled(kernels: Kernels) -> None:
    """In one graph, with the same bits; a compiled backward pass has gradients of its own."""
    inputs = inputs_of(mask=True)
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    call = partial(mr.linear_distillation, loss="jsd", workspace=0)
    found = []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        kernels.scaled_in_place.clear()
        loss = function(**inputs)
        found.append((loss, *torch.autograd.grad(3 * loss, leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not kernels.scaled_in_place


def test_opcheck(kernels: Kernels) -> None:
    inputs = inputs_of(mask=True)
    x, weight = (inputs[name].requires_grad_() for name in ("x", "weight"))
    tensors, options = tuple(inputs.values()), (True, 1.7, 0.3, [True, True], 0)
    torch.library.opcheck(torch.ops.monoidreduce.linear_jsd.default, (*tensors, *options))
    _, *gradients = torch.ops.monoidreduce.linear_jsd(*tensors, *options)
    backward = (torch.tensor(3.0), x.detach(), weight.detach(), *tensors[2:], *gradients, *options)
    torch.library.opcheck(torch.ops.monoidreduce.linear_jsd_backward.default, (*backward, [True, False]))


def test_mapped(kernels: Kernels) -> None:
    """torch.func differentiates it, and maps it by a loop."""
    inputs = inputs_of(classes=300)
    x, weight, *teacher = inputs.values()

    def loss(x: Tensor, teacher_x: Tensor) -> Tensor:
        return mr.linear_distillation(x, weight, teacher_x, teacher[1], loss="jsd", workspace=0)

    parts = [t.view(3, 100, -1) for t in (x, teacher[0])]
    found = torch.func.vmap(torch.func.grad(loss))(*parts)
    expected = torch.stack([torch.func.grad(loss)(*part) for part in zip(*parts, strict=True)])
    assert torch.equal(found, expected) and found.any() and "jsd_rows" in kernels.launched


def test_gradients_are_scaled_in_place(kernels: Kernels) -> None:
    """A leaf takes the memory that the forward pass computed its gradient in."""
    inputs = inputs_of()
    leaves = [inputs[name].requires_grad_() for name in ("x", "weight")]
    (3 * mr.linear_distillation(**inputs, loss="jsd")).backward()
    assert kernels.scaled_in_place == [leaf.grad.data_ptr() for leaf in leaves]


@pytest.mark.parametrize(
    ("why", "change"),
    (
        ("bfloat16", lambda t: {name: x.half() for name, x in t.items()}),
        ("tokens", lambda t: t | {"reduction": "none"}),
        ("teacher", lambda t: t | {"teacher_grad": True, "teacher_x": t["teacher_x"].requires_grad_()}),
        ("a multiple of 8", lambda t: t | {name: t[name][:, :23] for name in ("x", "weight")}),
        ("biases", lambda t: t | {"bias": torch.zeros(1111)}),
    ),
)
def test_calls_that_store_no_scores(why: str, change: Any, kernels: Kernels) -> None:
    call = change(inputs_of())
    mr.linear_distillation(**call, loss="jsd")
    assert not kernels.launched
    assert any(why in reason for reason in mr.explain("linear_distillation", **call, loss="jsd").reasons)


def test_explanation(kernels: Kernels) -> None:
    found = mr.explain("linear_distillation", **inputs_of(), loss="jsd", workspace=8 * 1112 * 256)
    assert found.forward == "jsd_forward/cuda/sm90/bfloat16" and found.deterministic
    assert found.reasons[0] == "scores of 256 of 300 rows at a time are stored in float32"


@pytest.mark.parametrize("workspace", WORKSPACES)
def test_explained_for_a_gpu_that_is_not_here(workspace: int) -> None:
    """As the layout has it."""
    found = mr.explain("linear_distillation", **inputs_of(), loss="jsd", workspace=workspace, hardware="h100")
    assert found.forward == "jsd_forward/cuda/sm90/bfloat16" and found.workspace == workspace
    layout = Layout.of(300, 1111, 24, workspace, True)
    assert found.reasons[0] == f"scores of {layout.at_once} of 300 rows at a time are stored in float32"
    kept = f"local gradients of the last {1111 - layout.own.start} of 1111 classes are kept"
    assert (kept in str(found)) == (layout.at_once < 300)
    assert (f"again, {layout.again} classes at a time" in str(found)) == (layout.again > 0)


def test_explained_for_a_gpu_without_the_kernels() -> None:
    found = mr.explain("linear_distillation", **inputs_of(), loss="jsd", hardware="a100")
    assert found.forward == "statistics_fold/cuda/sm80/bfloat16"
    assert "scores are not stored: only kernels for Hopper store scores" in found.reasons


def test_explained_without_a_gradient_of_the_weights() -> None:
    inputs = inputs_of()
    inputs["x"].requires_grad_()
    found = mr.explain("linear_distillation", **inputs, loss="jsd", workspace=0, hardware="h100")
    assert found.reasons[0].startswith("scores of 128 of 300 rows") and "are kept" not in str(found)


# The kernels


def scores_of(rows: int, classes: int, level: float = 0) -> Tensor:
    """[rows, classes], in rows of whole vectors; what is behind them is NaN."""
    memory = torch.full((rows, -(-classes // 8) * 8), math.nan)
    memory[:, :classes] = 3 * torch.randn(rows, classes) + level
    return memory[:, :classes]


def run(
    kernels: Kernels, student: Tensor, teacher: Tensor, mask: Tensor | None = None, **numbers: float
) -> tuple[Tensor, Tensor]:
    """Losses, and local gradients, which computed from statistics are the same."""
    inverse, beta = 1 / numbers.get("temperature", 1), numbers.get("beta", 0.5)
    losses, stats = torch.full((len(student),), math.nan), torch.full((len(student), 5), math.nan)
    factor = torch.full((1,), (1 - beta) * inverse)
    again = student.as_strided_scatter(student, student.shape, student.stride())
    kernels.jsd_rows(student, teacher, mask, losses, stats, factor, inverse, beta)
    found = stored_scores._in_16_bits(student)[:, : student.shape[1]]
    kernels.jsd_gradient(again, teacher, mask, stats, factor, inverse, beta)
    recomputed = stored_scores._in_16_bits(again)[:, : student.shape[1]]
    assert torch.equal(recomputed.nan_to_num(7), found.nan_to_num(7))
    return losses, found


def expected(student: Tensor, teacher: Tensor, beta: float, temperature: float) -> tuple[Tensor, Tensor]:
    leaf = student.double().requires_grad_()
    log_p, log_q = ((s / temperature).log_softmax(1) for s in (leaf, teacher.double()))
    log_m = torch.logaddexp(math.log(beta) + log_q, math.log1p(-beta) + log_p)
    losses = sum(
        w * torch.where(log.exp() > 0, log.exp() * (log - log_m), 0).sum(1)
        for w, log in ((beta, log_q), (1 - beta, log_p))
    )
    (gradients,) = torch.autograd.grad(losses.sum(), leaf)
    return losses.detach(), gradients


@pytest.mark.parametrize("levels", ((0, 0), (1000, 0), (10, -1000), (100, 100)))
@pytest.mark.parametrize("classes", (1, 9, 2048, 5003))
def test_rows(classes: int, levels: tuple[float, float], kernels: Kernels) -> None:
    student, teacher = (scores_of(7, classes, level) for level in levels)
    right = expected(student, teacher, 0.3, 1.7)
    losses, gradients = run(kernels, student, teacher, beta=0.3, temperature=1.7)
    torch.testing.assert_close(losses.double(), right[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients.double(), right[1], rtol=2**-8, atol=1e-7)


def test_equal_distributions(kernels: Kernels) -> None:
    student = scores_of(7, 3000)
    losses, gradients = run(kernels, student.clone(), student.clone(), beta=0.2)
    assert losses.abs().max() < 1e-6 and gradients.float().abs().max() < 1e-6


def test_excluded_classes(kernels: Kernels) -> None:
    """In one distribution, in both, and all but one."""
    student, teacher = scores_of(4, 300), scores_of(4, 300)
    student[0, :100] = teacher[1, 50:200] = -math.inf
    student[2, ::2] = teacher[2, ::3] = -math.inf
    student[3, 1:] = -math.inf
    right = expected(student, teacher, 0.5, 1.0)
    losses, gradients = run(kernels, student, teacher)
    torch.testing.assert_close(losses.double(), right[0], rtol=1e-5, atol=1e-6)
    assert gradients.isfinite().all() and not gradients[3].any()


@pytest.mark.parametrize("wrong", (math.nan, math.inf))
def test_rows_that_are_not_finite(wrong: float, kernels: Kernels) -> None:
    """NaN is that row's alone; so is a row without a class."""
    student, teacher = scores_of(6, 300), scores_of(6, 300)
    student[1, 299], teacher[3, 0] = wrong, wrong
    student[4] = -math.inf
    mask = torch.tensor([True, True, True, True, True, False])
    student[5] = math.nan
    losses, gradients = run(kernels, student, teacher, mask)
    assert losses.isnan().tolist() == [False, True, False, True, True, False]
    assert gradients[[1, 3, 4]].isnan().any(1).all() and gradients[[0, 2, 5]].isfinite().all()
    assert losses[5] == 0 and not gradients[5].any()
