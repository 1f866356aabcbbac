"""`mr.float32`: how GPUs multiply float32 operands."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monoidreduce as mr
from monoidreduce._ops import mlp_by_torch


def forward() -> str:
    """The kernels that a float32 loss takes on an H100."""
    x, weight = torch.zeros(128, 128), torch.zeros(300, 128)
    target = torch.zeros(128, dtype=torch.int64)
    return mr.explain("linear_cross_entropy", x, weight, target, hardware="h100").forward


def test_modes() -> None:
    assert mr.get_float32() == "auto"
    assert forward() == "cross_entropy_forward/cuda/simt/float32"
    with mr.float32("simt"):
        assert forward() == "cross_entropy_forward/cuda/simt/float32"
        with mr.float32("emulated"):
            assert forward() == "cross_entropy_forward/cuda/planes/float32"
        assert mr.get_float32() == "simt"
    assert mr.get_float32() == "auto"


@pytest.fixture
def tf32() -> Iterator[None]:
    """torch allows tf32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_emulated_uses_no_tf32(tf32: None) -> None:
    q = torch.zeros(1, 2, 256, 64)
    assert mr.explain("attention", q, q, q, hardware="h100").forward.endswith("/sm80/float32")
    for mode in ("emulated", "simt"):
        with mr.float32(mode):
            assert not mr.explain("attention", q, q, q, hardware="h100").forward.endswith("/sm80/float32")


@pytest.mark.parametrize("width", (24, 64, 96, 128))
def test_attention_says_which_mode_has_tensor_cores(width: int) -> None:
    q = torch.zeros(1, 64, 256, width)
    explanation = mr.explain("attention", q, q, q, hardware="h100")
    assert (explanation.forward, explanation.backward) == paths_of_attention("simt")
    assert any("mr.float32 does not say emulated" in reason for reason in explanation.reasons)
    with mr.float32("emulated"):
        explanation = mr.explain("attention", q, q, q, hardware="h100")
    assert (explanation.forward, explanation.backward) == paths_of_attention("planes")


@pytest.mark.parametrize("width", (64, 128))
@pytest.mark.parametrize("softcap", (None, 30.0))
@pytest.mark.parametrize("bias", (None, (256, 256), (64, 1, 256), "mask"))
def test_attention_in_planes_takes_softcaps_and_biases(
    bias: tuple[int, ...] | str | None, softcap: float | None, width: int
) -> None:
    q = torch.zeros(1, 64, 256, width)
    options: dict[str, Any] = {} if softcap is None else {"softcap": softcap}
    if bias == "mask":
        options["bias"] = torch.ones(256, 256, dtype=torch.bool)
    elif bias is not None:
        options["bias"] = torch.zeros(bias, requires_grad=True)
    with mr.float32("emulated"):
        explanation = mr.explain("attention", q, q, q, hardware="h100", **options)
    assert (explanation.forward, explanation.backward) == paths_of_attention("planes")


@pytest.mark.parametrize(
    ("bias", "reason"),
    (
        (torch.ones(256, 1, dtype=torch.bool), "is the same for all columns"),
        (torch.empty_strided((256, 256), (1 << 29, 1), device="meta"), "are 2^31 bytes apart or more"),
    ),
    ids=("of_rows", "far_apart"),
)
def test_attention_in_planes_says_which_biases_it_does_not_take(bias: torch.Tensor, reason: str) -> None:
    q = torch.zeros(1, 64, 256, 64, device=bias.device)
    with mr.float32("emulated"):
        explanation = mr.explain("attention", q, q, q, bias=bias, hardware="h100")
    assert (explanation.forward, explanation.backward) == paths_of_attention("simt")
    assert any("the inputs are float32, and" in text and reason in text for text in explanation.reasons)


@pytest.mark.parametrize("widths", ((136, 64), (8, 256), (192, 128), (256, 256)), ids=str)
@pytest.mark.parametrize(
    "options",
    (
        {},
        {"causal": True},
        {"softcap": 5.0},
        {"bias": torch.zeros(64, 256, 256)},
        {"bias": torch.ones(256, 256, dtype=torch.bool)},
    ),
)
def test_wide_attention_in_planes(widths: tuple[int, int], options: dict[str, Any]) -> None:
    q, v = (torch.zeros(1, 64, 256, width) for width in widths)
    with mr.float32("emulated"):
        explanation = mr.explain("attention", q, q, v, **options, hardware="h100")
    assert (explanation.forward, explanation.backward) == paths_of_attention("planes")


@pytest.mark.parametrize(
    ("shape", "shared"), (((64, 256, 256), False), ((256, 256), True), ((64, 1, 256), True))
)
@pytest.mark.parametrize("wanted", (False, True), ids=("constant", "learned"))
def test_attention_in_planes_adds_shared_biases_in_any_order(
    shape: tuple[int, ...], shared: bool, wanted: bool
) -> None:
    """So in the deterministic mode other kernels add its gradient, if that is wanted."""
    q, bias = torch.zeros(1, 64, 256, 64), torch.zeros(shape, requires_grad=wanted)
    with mr.float32("emulated"):
        by_default = mr.explain("attention", q, q, q, bias=bias, hardware="h100")
        torch.use_deterministic_algorithms(True)
        try:
            in_order = mr.explain("attention", q, q, q, bias=bias, hardware="h100")
        finally:
            torch.use_deterministic_algorithms(False)
    elsewhere = wanted and shared
    assert by_default.backward == "attention_backward/cuda/planes/float32"
    assert by_default.deterministic != elsewhere
    family = "simt" if elsewhere else "planes"
    assert in_order.backward == f"attention_backward/cuda/{family}/deterministic/float32"
    assert any("scores share a bias" in text for text in in_order.reasons) == elsewhere


def test_attention_does_not_name_a_mode_that_would_not_help() -> None:
    q = torch.zeros(1, 64, 256, 64)
    wide = torch.zeros(1, 64, 256, 264)
    for explanation in (
        mr.explain("attention", q, q, q, bias=torch.ones(256, 1, dtype=torch.bool), hardware="h100"),
        mr.explain("attention", wide, wide, wide, hardware="h100"),
        mr.explain("attention", q, q, q, hardware="a100-80gb"),
    ):
        assert (explanation.forward, explanation.backward) == paths_of_attention("simt")
        assert not any("emulated" in reason for reason in explanation.reasons)


def mlp_tensors(rows: int, width: int, hidden: int, outputs: int) -> tuple[torch.Tensor, ...]:
    return torch.zeros(rows, width), torch.zeros(hidden, width), torch.zeros(outputs, hidden)


def of_ordinary_cores(sizes: tuple[int, ...]) -> str:
    """What multiplies an MLP without tensor cores: torch, if it is large."""
    return "torch" if mlp_by_torch.is_large(*mlp_tensors(*sizes)) else "simt"


# Those with a width over 128 run in parts.
@pytest.mark.parametrize(
    "sizes",
    (
        (64, 57, 64, 8),
        (300, 8, 1000, 128),
        (64, 128, 16384, 128),
        (64, 136, 64, 57),
        (300, 64, 500, 129),
        (3000, 4096, 16384, 1024),
    ),
)
@pytest.mark.parametrize("deterministic", (False, True), ids=("default", "deterministic"))
def test_mlps_say_which_mode_has_tensor_cores(sizes: tuple[int, ...], deterministic: bool) -> None:
    torch.use_deterministic_algorithms(deterministic)
    try:
        named = mr.explain("mlp", *mlp_tensors(*sizes), bias1=torch.zeros(sizes[2]), hardware="h100")
        with mr.float32("emulated"):
            found = mr.explain("mlp", *mlp_tensors(*sizes), bias1=torch.zeros(sizes[2]), hardware="h100")
    finally:
        torch.use_deterministic_algorithms(False)
    assert named.forward == f"mlp_forward/cuda/{of_ordinary_cores(sizes)}/float32"
    assert any("mr.float32 does not say emulated" in reason for reason in named.reasons)
    assert found.forward == "mlp_forward/cuda/planes/float32"
    in_parts = max(sizes[1], sizes[3]) > 128  # by the kernels of the default mode
    mode = "/deterministic" if deterministic and not in_parts else ""
    assert found.backward == f"mlp_backward/cuda/planes{mode}/float32"
    assert found.deterministic  # each gradient has a single writer


@pytest.mark.parametrize(
    ("sizes", "hardware", "reason"),
    (
        (
            (300, 136, 500, 56),
            "h100",
            "a width is 136, more than 128; in parts: not sm90 or sm80: the inputs",
        ),
        ((300, 136, 500, 56), "h100", "56 rows, columns or elements of a row are too few for planes"),
        ((63, 136, 500, 64), "h100", "63 rows, columns or elements of a row are too few for planes"),
        ((300, 64, 56, 129), "h100", "56 rows, columns or elements of a row are too few for planes"),
        ((300, 136, 63, 136), "h100", "63 rows, columns or elements of a row are too few for planes"),
        ((300, 136, 500, 64), "a100-80gb", "the inputs are float32, not multiplied in tf32"),
        ((300, 0, 500, 64), "h100", "a width is 0"),
        ((300, 56, 500, 8), "h100", "56 rows, hidden units or elements of a row are too few for planes"),
        ((63, 64, 500, 64), "h100", "63 rows, hidden units or elements of a row are too few for planes"),
        ((300, 64, 63, 64), "h100", "63 rows, hidden units or elements of a row are too few for planes"),
        ((300, 64, 500, 64), "a100-80gb", "the inputs are float32, not multiplied in tf32"),
    ),
)
def test_other_mlps_say_why(sizes: tuple[int, ...], hardware: str, reason: str) -> None:
    auto = mr.explain("mlp", *mlp_tensors(*sizes), hardware=hardware)
    assert not any("emulated" in text for text in auto.reasons)
    with mr.float32("emulated"):
        found = mr.explain("mlp", *mlp_tensors(*sizes), hardware=hardware)
    assert {found.forward, found.backward} == {
        f"mlp_{way}/cuda/{of_ordinary_cores(sizes)}/float32" for way in ("forward", "backward")
    }
    assert any(reason in text for text in found.reasons), found.reasons


@pytest.mark.parametrize(("tile_bytes", "held"), ((12 * 256 * 128, True), (12 * 256 * 128 - 1, False)))
def test_both_passes_of_a_wide_mlp_need_a_tile_in_the_workspace(tile_bytes: int, held: bool) -> None:
    """Backward holds two numbers of a hidden value, and planes of one; forward could do with two thirds."""
    with mr.float32("emulated"), mr.workspace(tile_bytes):
        found = mr.explain("mlp", *mlp_tensors(9000, 136, 300, 200), hardware="h100")
    tier = "planes" if held else "torch"  # which takes parts of 128 rows, without planes
    assert found.forward == f"mlp_forward/cuda/{tier}/float32"
    assert found.backward == f"mlp_backward/cuda/{tier}/float32"
    reason = "in parts of 256 rows and 128 hidden units" if held else "bytes holds no tile of hidden values"
    assert any(text.startswith("backward: ") and reason in text for text in found.reasons), found.reasons


@pytest.mark.parametrize(
    ("sizes", "parts"),
    (
        ((16384, 256, 16384, 256), ("8192 rows and 5504 hidden units", "3328 rows and 8192 hidden units")),
        ((2048, 256, 2048, 256), ("2048 rows and 2048 hidden units",) * 2),
    ),
    ids=("many_parts", "one_part"),
)
def test_parts_in_planes_keep_clusters_busy(sizes: tuple[int, ...], parts: tuple[str, str]) -> None:
    """A gradient [8192, 256] has 64 tiles for 66 clusters; one [1664, 256] would have 14."""
    with mr.float32("emulated"):
        found = mr.explain("mlp", *mlp_tensors(*sizes), hardware="h200")
    for way, part in zip(("forward", "backward"), parts, strict=True):
        assert any(text.startswith(f"{way}: ") and f"in parts of {part}" in text for text in found.reasons)


def test_a_workspace_without_room_names_no_mode() -> None:
    """Nor a device: the mode was not asked for, and would not help."""
    with mr.workspace(0):
        found = mr.explain("mlp", *mlp_tensors(300, 136, 500, 64), hardware="a100-80gb")
    assert not any("emulated" in text or "Hopper" in text for text in found.reasons), found.reasons
    assert any("the inputs are float32" in text for text in found.reasons), found.reasons


def test_a_mode_is_named_only_where_it_would_help() -> None:
    """Not beside what excludes tensor cores in every mode."""
    q = torch.zeros(1, 64, 256, 64)
    none = q[:, :, :0]
    x, weight, narrow = torch.zeros(128, 128), torch.zeros(300, 128), torch.zeros(128, 4)
    for explanation, reason in (
        (mr.explain("attention", q, q, q, scale=-1.0, hardware="h100"), "the scale is -1, not positive"),
        (mr.explain("attention", q, none, none, hardware="h100"), "no rows or no columns"),
        (mr.explain("logsumexp_matmul", x, weight, scale=-1.0, hardware="h100"), "the scale is -1"),
        (mr.explain("logsumexp_matmul", narrow, narrow, hardware="h100"), "too few for planes"),
        (mr.explain("logsumexp_matmul", x, weight, hardware="a100-80gb"), "the inputs are float32"),
    ):
        assert any(reason in text for text in explanation.reasons), explanation.reasons
        assert not any("emulated" in text for text in explanation.reasons)
    named = mr.explain("logsumexp_matmul", x, weight, hardware="h100").reasons
    assert any("the inputs are float32, and mr.float32 does not say emulated" in text for text in named)


@mr.statistics
def gaussian(score: Any, mass: Any) -> Any:
    return dict(sum=mr.stat.total(mass * torch.exp(score)))


@pytest.mark.parametrize("width", (24, 56, 59, 64, 128, 136))
def test_gradients_of_folds_are_summed_on_chip(width: int) -> None:
    """In planes from 57 to 128 wide. Threads own narrower rows, and wider ones have local gradients."""
    a, b = (torch.zeros(n, width, requires_grad=True) for n in (300, 500))
    with mr.float32("emulated"):
        found = mr.explain(gaussian, a, b, column={"mass": torch.zeros(500)}, hardware="h100")
    which, tier = "row_gradient", "simt" if width <= 56 else "planes"
    if width > 128:
        which = "local_gradient"
    assert found.backward == f"statistics_{which}/cuda/{tier}/float32"
    assert any("no local gradients are held" in reason for reason in found.reasons) == (56 < width <= 128)


@mr.statistics
def many_sums(score: Any, mass: Any) -> Any:
    return {f"sum{n}": mr.stat.total(mass * torch.cos(n * score)) for n in range(14)}


@pytest.mark.parametrize(("width", "which"), ((64, "row_gradient"), (128, "local_gradient")))
def test_gradients_that_read_many_numbers_take_other_kernels(width: int, which: str) -> None:
    """The numbers of a tile of columns must fit in shared memory beside the planes."""
    a, b = (torch.zeros(n, width, requires_grad=True) for n in (300, 500))
    with mr.float32("emulated"):
        found = mr.explain(many_sums, a, b, column={"mass": torch.zeros(500)}, hardware="h100")
    assert found.backward == f"statistics_{which}/cuda/{'simt' if width == 64 else 'planes'}/float32"


@pytest.mark.parametrize("loss", ("cross_entropy", "forward_kl", "reverse_kl", "jsd"))
@pytest.mark.parametrize(
    ("widths", "tier"), (((128, 192), "planes"), ((192, 120), "simt"), ((48, 192), "simt"))
)
def test_distillation(widths: tuple[int, int], tier: str, loss: str) -> None:
    """Both passes take the same kernels, by the width of the narrower operands."""
    x, weight, teacher_x, teacher_weight = (torch.zeros(n, width) for width in widths for n in (300, 500))
    student = x.requires_grad_(), weight.requires_grad_()
    with mr.float32("emulated"):
        found = mr.explain(
            "linear_distillation", *student, teacher_x, teacher_weight, loss=loss, hardware="h100"
        )
    passes = "distillation_forward", "distillation_backward"
    if loss == "jsd":
        passes = "statistics_fold", "statistics_local_gradient"
    assert (found.forward, found.backward) == tuple(f"{name}/cuda/{tier}/float32" for name in passes)
    reason = "is too narrow for two scores in planes" if tier == "simt" else "float32 as planes of float16"
    few = "are too few for planes of float16" if 48 in widths else reason
    assert any(few in text for text in found.reasons), found.reasons


@pytest.mark.parametrize("teacher_grad", (False, True))
def test_cost_of_distillation(teacher_grad: bool) -> None:
    """Both scores forward and again backward, and the products for the gradients; each is three products."""
    rows, classes, widths = 4096, 32000, (2048, 1024)
    x, weight, teacher_x, teacher_weight = (
        torch.empty(n, width, device="meta", requires_grad=True) for width in widths for n in (rows, classes)
    )
    with mr.float32("emulated"):
        found = mr.cost(
            "linear_distillation",
            x,
            weight,
            teacher_x,
            teacher_weight,
            teacher_grad=teacher_grad,
            hardware="h100",
        )
    score, other = (3 * 2 * rows * classes * width for width in widths)
    products = 2 * (score + teacher_grad * other)
    assert found.executed_flops == pytest.approx(2 * (score + other) + products, rel=0.03)


def paths_of_attention(tier: str) -> tuple[str, str]:
    return f"attention_forward/cuda/{tier}/float32", f"attention_backward/cuda/{tier}/float32"


def test_a_block_is_of_its_thread_and_a_setting_of_all() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(mr.get_float32()))
    with mr.float32("simt"):
        mr.set_float32("emulated")
        try:
            thread.start()
            thread.join()
        finally:
            mr.set_float32("auto")
    assert found == ["emulated"]


@mr.float32("simt")
def decorated() -> str:
    return mr.get_float32()


def test_a_decorated_function() -> None:
    assert decorated() == "simt" and mr.get_float32() == "auto"


@pytest.mark.parametrize("set_mode", (mr.float32, mr.set_float32))
def test_another_mode_is_refused(set_mode: object) -> None:
    with pytest.raises(ValueError, match=r"^mode: expected one of auto, emulated, simt, got"):
        set_mode("exact")  # type: ignore[operator]
