"""The jobs of kernels beside an enumeration of rows and columns, and constants beside the C++ sources."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce._ops import slices
from monoidreduce.hardware import HARDWARE
from monoidreduce.theory.costs import model, modelled, work
from monoidreduce.theory.costs.cost import kernels as kernels_of
from monoidreduce.theory.costs.sizes import call_of
from monoidreduce.theory.costs.work import Band, Work

CSRC = Path(__file__).resolve().parents[3] / "csrc"

BANDS = [
    Band(rows, columns, left, right)
    for rows, columns in ((7, 7), (5, 12), (12, 5), (1, 9))
    for left in (-1, 0, 3)
    for right in (-1, 0, 2)
]


def kept(band: Band) -> torch.Tensor:
    """[rows, columns]: is a pair kept; the last row sees the last column in the middle of its window."""
    aligned = torch.arange(band.rows)[:, None] + band.columns - band.rows
    distance = torch.arange(band.columns) - aligned
    mask = torch.ones(band.rows, band.columns, dtype=torch.bool)
    if band.left >= 0:
        mask &= distance >= -band.left
    if band.right >= 0:
        mask &= distance <= band.right
    return mask


@pytest.mark.parametrize("band", BANDS, ids=str)
def test_pairs(band: Band) -> None:
    assert band.pairs() == int(kept(band).sum())


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("band", BANDS, ids=str)
def test_jobs_reach_from_the_first_to_the_last_tile_that_is_kept(band: Band, by_rows: bool) -> None:
    mask = kept(band) if by_rows else kept(band).T
    staying, streamed = 2, 3
    expected: Counter[int] = Counter()
    for lines in mask.split(staying):
        tiles = [i for i, part in enumerate(lines.any(0).split(streamed)) if part.any()]
        expected[tiles[-1] - tiles[0] + 1 if tiles else 0] += 1
    assert band.jobs(by_rows, staying, streamed) == expected


@pytest.mark.parametrize(
    ("length", "steps", "options"),
    [
        (1 << 22, work._STEPS_OF_HEAD, {"causal": True}),  # jobs differ in length: it takes many
        (1 << 19, 1 << 17, {}),
        (1 << 19, 1 << 14, {"window": (1023, 0)}),
        pytest.param(1 << 22, work._STEPS_OF_HEAD, {"window": (2**14, 0)}, marks=pytest.mark.release),
    ],
    ids=str,
)
def test_jobs_that_are_taken_together_read_as_they_do_apart(
    length: int, steps: int, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.empty(1, 1, length, 128, dtype=torch.bfloat16, device="meta")
    found = []
    for most in (1 << 24, steps):
        monkeypatch.setattr(work, "_STEPS_OF_HEAD", most)
        work._streamed.cache_clear()
        cost = mr.cost("attention", q, q, q, hardware="h100", **options)
        found.append([p.dram_read for p in cost.passes if p.tiles])
    work._streamed.cache_clear()
    apart, together = found
    assert together == pytest.approx(apart, rel=0.05)


def test_groups_of_a_contraction_that_are_left_out_read_as_the_others_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = (1 << 16, 1 << 15, 1024, (256, 256), HARDWARE["h100"])
    whole = work._contraction_read(*sizes)
    monkeypatch.setattr(work, "_TILES", 1 << 11)
    assert work._contraction_read.__wrapped__(*sizes) == pytest.approx(whole, rel=0.05)


@pytest.mark.parametrize("hardware", ["h100", "a100", "cpu"])
@pytest.mark.parametrize("options", [{"causal": True}, {"window": (1023, 0)}, {}], ids=str)
def test_a_longest_call_has_a_cost(hardware: str, options: dict[str, object]) -> None:
    """Of pairs that are counted in closed form, it has all."""
    length = modelled.MOST
    q = torch.empty(1, 1, length, 128, dtype=torch.bfloat16, device="meta")
    found = mr.cost("attention", q, q, q, hardware=hardware, **options)
    pairs = {1: length**2, 2: length * (length + 1) // 2, 3: 1024 * length - 1023 * 1024 // 2}
    kept = pairs[1 if not options else 2 if "causal" in options else 3]
    assert found.useful_flops == pytest.approx(12 * 128 * kept, rel=1e-12) and found.seconds > 0


@pytest.mark.parametrize("hardware", ["h100", "cpu"])
def test_a_longer_call_is_refused(hardware: str) -> None:
    q = torch.empty(1, 1, 64, 64, device="meta")
    k = torch.empty(1, 1, 1 << 40, 64, device="meta")
    complaint = rf"^k: expected at most {modelled.MOST} along each axis, .*, got \[1, 1, {1 << 40}, 64\]$"
    with pytest.raises(ValueError, match=complaint):
        mr.cost("attention", q, k, k, hardware=hardware)


# Jobs of a plan


def works(op: str, *tensors: torch.Tensor, **options: object) -> list[tuple[bool, Work]]:
    return kernels_of(op, *tensors, hardware="h100", **options)


def meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def test_jobs_of_few_rows_are_splits_of_packed_tiles() -> None:
    """8 heads of 512 rows are 64 tiles. 128 rows of an MLP are 2, with 64 tiles of units, in 64 splits."""
    q, x, w1, w2 = meta(1, 8, 512, 64), meta(128, 128), meta(8192, 128), meta(128, 8192)
    assert works("attention", q, q, q)[0][1].jobs == Counter({4: 64})
    forward, combining, *_ = works("mlp", x, w1, w2)
    assert forward[1].jobs == Counter({1: 128}) and combining[1].name == "combine_splits"
    assert forward[1].written == combining[1].read == 4 * 64 * 128 * 128  # sums of each split


def test_a_causal_tile_of_few_rows_has_the_tiles_that_its_rows_keep() -> None:
    q = meta(1, 8, 512, 64)
    assert works("attention", q, q, q, causal=True)[0][1].jobs == Counter({1: 16, 2: 16, 3: 16, 4: 16})


def test_heads_of_a_group_share_a_tile_of_few_rows() -> None:
    """A decoding step: 8 heads for each of 2 key heads, so 2 tiles of 8 lines, in splits."""
    q, k = meta(1, 16, 1, 128), meta(1, 2, 8192, 128)
    jobs = works("attention", q, k, k, needed=())[0][1].jobs
    assert sum(tiles * count for tiles, count in jobs.items()) == 2 * 8192 // 128
    assert 2 < jobs.total() <= 132


def test_the_last_jobs_of_attention_are_split_as_planned() -> None:
    """2048 jobs on 132 multiprocessors leave 68. 32 jobs of 4 tiles are too short, and masks allow none."""
    long, short = meta(8, 16, 2048, 128), meta(1, 8, 512, 64)

    def split(q: torch.Tensor, causal: bool) -> int:
        return next(w.shared for _, w in works("attention", q, q, q, causal=causal) if "backward" in w.kernel)

    assert [split(long, False), split(long, True), split(short, False)] == [2048 % 132, 0, 0]


def test_causal_jobs_of_groups_are_in_parts_as_planned() -> None:
    """Of 8 heads in a group two are a part. Few jobs are split by rows too: 32 tiles of a head in 4 x 2."""

    def jobs(batch: int, heads: int, key_heads: int) -> Counter[int]:
        q, k = meta(batch, heads, 4096, 128), meta(batch, key_heads, 4096, 128)
        return next(w.jobs for _, w in works("attention", q, k, k, causal=True) if "backward" in w.kernel)

    whole = jobs(2, 32, 32)
    assert whole == Counter(dict.fromkeys(range(2, 65, 2), 64))
    assert jobs(2, 32, 4) == Counter({2 * tiles: count // 2 for tiles, count in whole.items()})
    few = jobs(1, 8, 1)
    assert few.total() == 32 * 4 * 2 and max(few) == 2 * 64 // 2
    assert sum(tiles * count for tiles, count in few.items()) == 8 * sum(range(2, 65, 2))


# What a profiler saw on an H100 at commit 96b0de2, less kernels of the bench and a second one of torch's sum.
# Later code has no product of upstream gradients in the losses' backward passes; it is left out too. Nor does
# it fill sums of the MLP with zeros, as it did once in its forward pass and three times in its backward pass.
# The factors of tokens in a reduced loss take fewer kernels: nine of cross entropy's backward pass are gone,
# and two of distillation's. cuBLAS multiplies dlogits by the weight, and another kernel casts the result; one
# did both. It rounds small products of an MLP itself, for which there were four kernels. A sum that cuBLAS
# writes is not filled with zeros first. The three passes of width 256 are one kernel. The kernel that
# prepares attention's rows clears sums and marks. Losses of 256 tokens neither order nor copy them together,
# and what saved dlogits are scaled by is no tensor: three kernels of cross entropy's forward pass are gone
# and one of its backward pass, two and one of log-probabilities, and one of distillation's forward pass.
LAUNCHES = [
    ("attention", {"B": 1, "H": 8, "L": 512, "d": 64}, (1, 3)),
    ("attention", {"B": 1, "H": 8, "L": 512, "d": 64, "causal": True}, (2, 4)),
    ("attention", {"B": 1, "H": 8, "L": 512, "d": 256, "causal": True}, (2, 3)),
    ("mlp", {"B": 128, "K": 8192, "d": 128}, (2, 3)),
    ("mlp", {"B": 1024, "K": 1024, "d": 512}, (2, 4)),
    ("linear_cross_entropy", {"N": 256, "V": 2048, "D": 512}, (4, 4)),
    ("linear_log_probs", {"N": 256, "V": 2048, "D": 512}, (2, 5)),
    ("linear_distillation", {"N": 256, "V": 2048, "D": 512, "E": 1024}, (4, 5)),
    ("logsumexp_matmul", {"M": 1024, "N": 1024, "F": 64}, (1, 2)),
    ("logsumexp_matmul", {"M": 256, "N": 2048, "F": 512}, (2, 4)),
]


@pytest.mark.parametrize(("op", "given", "launches"), LAUNCHES, ids=str)
def test_launches_are_those_of_a_profile(op: str, given: dict[str, int], launches: tuple[int, int]) -> None:
    tensors, options = call_of(op, given, torch.bfloat16)
    passes = [backward for backward, _ in works(op, *tensors, **options)]
    assert (passes.count(False), passes.count(True)) == launches


@pytest.mark.parametrize(
    ("options", "scores"),
    (
        ({}, "planes"),
        ({"softcap": 30.0}, "planes/softcap"),
        ({"bias": torch.empty(512, 512, device="meta")}, "planes/bias"),
        ({"softcap": 30.0, "bias": torch.empty(512, 512, device="meta", dtype=torch.bool)}, "planes/bias"),
    ),
    ids=("plain", "softcap", "bias", "mask"),
)
def test_float32_attention_in_planes(options: dict[str, Any], scores: str) -> None:
    q = meta(2, 64, 512, 64).float()
    with mr.float32("emulated"):
        found = works("attention", q, q, q, **options)
    assert [work.name for _, work in found] == [
        "split_heads",
        f"attention_forward/{scores}",
        "repair_forward",
        "prepare_rows",
        "clear_marks",
        "split_heads",
        *(f"attention_backward/{scores}/{gradient} alone" for gradient in ("dq", "dk", "dv")),
        "repair_backward",
    ]


@pytest.mark.parametrize(
    ("shape", "given", "adds"),
    (
        ((2, 64, 512, 512), "kv", "dq"),
        ((1, 64, 512, 512), "kv", "dq"),
        ((2, 64, 1, 512), "qv", "dk"),
        ((2, 64, 1, 512), "qkv", "dk"),
    ),
    ids=str,
)
def test_a_pass_in_planes_adds_the_gradient_of_a_bias(shape: tuple[int, ...], given: str, adds: str) -> None:
    """That of the queries, or of the keys if queries share the bias; also if it computes nothing else."""
    operands = {name: meta(2, 64, 512, 64).float().requires_grad_(name in given) for name in "qkv"}
    biases = torch.empty(shape, device="meta"), torch.empty(shape, device="meta", requires_grad=True)
    with mr.float32("emulated"):
        without, with_gradient = (
            {
                work.name.split("/")[-1].removesuffix(" alone"): work
                for backward, work in works("attention", *operands.values(), bias=bias)
                if backward and work.name.startswith("attention_backward/")
            }
            for bias in biases
        )
    assert set(without) == {f"d{name}" for name in given}
    assert set(with_gradient) == {*without, adds}
    more = with_gradient[adds].written - (without[adds].written if adds in without else 0)
    assert more == 4 * biases[0].numel()


def test_split_columns_on_ordinary_cores_are_combined() -> None:
    a, b = meta(64, 256).float(), meta(100_000, 256).float()
    (fold, combine), *_ = [[work for backward, work in works("logsumexp_matmul", a, b) if not backward]]
    assert (fold.name, combine.name) == ("logsumexp_forward", "combine_splits")
    assert fold.written == combine.read > 100 * 64 * 8 and combine.written == 2 * 64 * 4


def test_float32_mlps_in_planes_multiply_three_times() -> None:
    tensors, options = call_of("mlp", {"B": 1024, "K": 2048, "d": 128}, torch.float32)
    with mr.float32("emulated"):
        found = works("mlp", *tensors, **options)
    split, forward, _, *_, d_x, d_w1, d_w2, _ = (work for _, work in found)
    assert [work.name for _, work in found] == [
        "split_heads",
        "mlp_forward/planes",
        "repair_forward",
        "clear_marks",
        "split_heads",
        "mlp_backward/planes/dx alone",
        "mlp_backward/planes/dw1 alone",
        "mlp_backward/planes/dw2 alone",
        "repair_backward",
    ]
    assert split.read == split.written == 4 * 128 * (1024 + 2 * 2048)
    assert (
        forward.jobs == d_x.jobs == {32: 8}
    )  # tiles of 128 rows, past which 64 hidden units stream at a time
    assert d_w1.jobs == d_w2.jobs == {16: 16}
    products = [work.flops / (2 * 128 * 64) for work in (forward, d_x, d_w1, d_w2)]
    assert products == [3 * 2, 3 * 3, 3 * 3, 3 * 2]


def test_wide_float32_mlps_multiply_planes_in_parts() -> None:
    """Seven products: forward two, backward two by one kernel and one for each gradient."""
    tensors, options = call_of("mlp", {"B": 1024, "K": 2048, "d": 256}, torch.float32)
    with mr.float32("emulated"):
        found = [work for _, work in works("mlp", *tensors, **options)]
    multiplied = [work for work in found if work.kernel]
    assert [work.kernel for work in multiplied] == [
        "mlp_hidden/planes",
        "plane_product/planes",
        "mlp_local_gradient/planes",
        *["plane_product/planes"] * 3,
    ]
    tiles = [4 * 16, 4 * 2, 4 * 16, 4 * 2, 8 * 2, 1 * 16]  # of 256 x 128
    assert [work.jobs for work in multiplied] == [{1: n} for n in tiles]
    assert [work.width for work in multiplied] == [256, 2048, 512, 2048, 1024, 1024]
    assert {work.flops for work in multiplied} == {3 * 2 * 256 * 128}
    splits = [work.written for work in found if work.name in ("split_rows", "split_columns")]
    line = 4 * 256 + 16  # bytes of both planes of a line and its scale
    of_operands, of_hidden = line * (1024 + 2 * 2048), (4 * 2048 + 16) * 1024
    of_columns = 4 * 1024 * 2048 + 4 * 2048 + 4 * 1024 * 256 + 4 * 256
    assert sum(splits) == 2 * of_operands + line * 1024 + 3 * of_hidden + of_columns


def test_gated_float32_mlps_multiply_planes_in_parts() -> None:
    """Eleven products: forward three; backward the gates, the ups, their upstream gradient, and five more."""
    tensors, options = call_of("mlp", {"B": 1024, "K": 2048, "d": 256, "gated": True}, torch.float32)
    with mr.float32("emulated"):
        found = [work for _, work in works("mlp", *tensors, **options)]
    multiplied = [work for work in found if work.kernel]
    dots, product = "plane_dots/planes", "plane_product/planes"
    assert [work.kernel for work in multiplied] == [dots, dots, product, dots, dots, dots, *[product] * 5]
    widths = [256, 256, 2048, 256, 256, 256, 2048, 1024, 1024, 2048, 1024]
    assert [work.width for work in multiplied] == widths


def test_products_of_torch_in_float32_have_its_rate() -> None:
    """In bfloat16 a product takes 1 / 15 of the time (H200)."""
    sizes = {"B": 4096, "K": 14336, "d": 4096, "gated": True}

    def seconds(dtype: torch.dtype) -> float:
        tensors, options = call_of("mlp", sizes, dtype)
        return mr.cost("mlp", *tensors, **options, hardware="h200").seconds

    exact = seconds(torch.float32)
    assert 12 < exact / seconds(torch.bfloat16) < 16
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert 6 < exact / seconds(torch.float32) < 9
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    ours = model.constants_of("a_kernel/simt/float32", 64, {})  # of this library
    assert ours.share < model.constants_of("torch/float32", 64, {}).share / 2


# Constants of the sources


def in_source(file: str, pattern: str) -> list[str]:
    """What the groups of a pattern are in a C++ source that has it once."""
    (found,) = re.finditer(pattern, (CSRC / file).read_text("utf-8"))
    return [*found.groups()]


def test_tiles_of_contractions_are_those_of_the_plan() -> None:
    """ContractionSizes: blocks of a cluster, rows and columns of its tile."""
    blocks, rows, columns = map(int, in_source("plan/tiles.h", r"kSm90Loss\{(\d+), (\d+), (\d+), "))
    assert (blocks, rows, columns) == (_C.CLUSTER_BLOCKS, slices.TILE_ROWS, slices.TILE_COLUMNS)


def test_tiles_of_products_are_those_of_the_kernel() -> None:
    """Of 256 columns, or of 192 where that is done first."""
    source = "cuda/sm90/loss_gradients.cu"
    wide, narrow = (
        int(*in_source(source, rf"using {name} = ContractionTile<(\d+), 4, 1, kRowsTransposed>;"))
        for name in ("Wide", "Narrow")
    )
    (factor,) = map(float, in_source(source, r"cost\(Narrow\{\}\) \* ([\d.]+) < cost\(Wide"))
    columns, clusters = 1920, 2  # 7.5 wide tiles, 10 narrow ones
    assert slices.product_waves(1, columns, clusters) == (factor * 5 * narrow, narrow)
    assert slices.product_waves(1, 8 * wide, clusters) == (4 * wide, wide)
