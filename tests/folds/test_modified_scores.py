"""GPU code of functions that modify scores: the host runs it in float64, NVRTC compiles kernels."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mods
import pytest
import torch
from host_simt import ScoresData, scores_data
from mods import CASES
from sampled import sampled

import monoidreduce as mr
from monoidreduce.folds.block_mask import linked
from monoidreduce.folds.cuda import compiler, kernels
from monoidreduce.folds.cuda.cuda_source import TableSum, scores_source
from monoidreduce.folds.cuda.kernels import BACKWARD, BACKWARD_IN_TURN, FORWARD
from monoidreduce.folds.program.derivative import hides_nan, is_of_distance, key_step, modified_sums, slopes
from monoidreduce.folds.program.mods import LINES, mods_of, tables
from monoidreduce.folds.program.program import parse

F64, CPU = torch.float64, torch.device("cpu")
SPILLS = re.compile(r"(\d+) bytes spill stores")
UNIT = """
#include "monoidreduce/device/program/score_element.h"
#include "monoidreduce/monoid.h"
namespace monoidreduce {
%s
}
using namespace monoidreduce;
using P = Program<double>;
extern "C" void run(const double* scores, ModifiedScoresData data, int batch, int head, double* score,
                    double* slope) {
  for (int i = 0; i < data.rows; ++i) {
    for (int j = 0; j < data.columns; ++j) {
      const int at = i * data.columns + j;
      const ScoreElement<double> e{scores[at], batch,     head,        i,        j,
                                   double(i),  double(j), double(j - i), data.tables, data.size};
      const bool kept = !P::kMasked || P::keeps(e);
      score[at] = kept ? P::score(e) : -infinity<double>(), slope[at] = kept ? P::slope(e) : 0;
    }
  }
}
extern "C" bool touches(ModifiedScoresData data, int row0, int rows, int column0, int columns) {
  return data.touches(1, 0, row0, rows, column0, columns);
}
extern "C" bool whole_column_tile(ModifiedScoresData data, int row0, int rows, int tile) {
  return data.strip_of_rows(1, 0, row0, rows).whole<8>(tile);
}
extern "C" bool whole_row_tile(ModifiedScoresData data, int column0, int columns, int tile) {
  return data.strip_of_columns(1, 0, column0, columns).whole<8>(tile);
}
extern "C" int next_column_tile(ModifiedScoresData data, int row0, int rows, int tile, int end) {
  return data.strip_of_rows(1, 0, row0, rows).next<8>(tile, end);
}
extern "C" int next_row_tile(ModifiedScoresData data, int column0, int columns, int tile, int end) {
  return data.strip_of_columns(1, 0, column0, columns).next<8>(tile, end);
}
"""


@pytest.fixture
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    if compiler.find() is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")


def on_host(text: str, folder: Path) -> Any:
    """The functions of a program, compiled by the host's compiler."""
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    unit, library = folder / "unit.cpp", folder / "unit.so"
    unit.write_text(UNIT % scores_source(text).text)
    flags = ("-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    subprocess.run(
        [os.environ.get("CXX", "c++"), *flags, "-I", mr.get_include(), unit, "-o", library], check=True
    )
    found = ctypes.CDLL(str(library))
    for name in ("touches", "whole_column_tile", "whole_row_tile"):
        getattr(found, name).restype = ctypes.c_bool
    return found


@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__)
def test_scores_and_slopes(make: Any, tmp_path: Path) -> None:
    """The generated functions, element by element, against torch and its autograd."""
    B, H, M, N = 2, 3, 19, 23
    torch.manual_seed(0)
    case = make(B, H, M, N, dtype=F64, device=CPU)
    traced = mods_of(case.score_mod, case.mask_mod)
    with torch.no_grad():
        real, integer, sizes = tables(traced.tensors, torch.empty(0, dtype=F64), ())
    library = on_host(traced.text, tmp_path)
    data = scores_data((real, integer), sizes, (M, N))
    i, j = torch.arange(M)[:, None], torch.arange(N)
    for b, h in ((0, 0), (1, 2)):
        scores = torch.randn(M, N, dtype=F64, requires_grad=True)
        found, slope = torch.empty(M, N, dtype=F64), torch.empty(M, N, dtype=F64)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (scores, found, slope)]
        library.run(pointers[0], data, b, h, *pointers[1:])
        at = (torch.tensor(b), torch.tensor(h), i, j)
        expected = scores * 1.0 if case.score_mod is None else case.score_mod(scores, *at)
        if case.mask_mod is not None:
            expected = expected.masked_fill(~case.mask_mod(*at), -math.inf)
        (slopes,) = torch.autograd.grad(expected.masked_fill(expected == -math.inf, 0).sum(), scores)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(slope, slopes, rtol=1e-13, atol=1e-13)


def of_blocks(kinds: torch.Tensor, block: tuple[int, int], rows: int, columns: int) -> ScoresData:
    """Of a call whose blocks have these kinds."""
    return scores_data((None, None), [], (rows, columns), linked(kinds), block)


def test_tiles_of_blocks(tmp_path: Path) -> None:
    """Does a tile meet a block that keeps anything; blocks of any size."""
    kinds = torch.randint(3, (2, 1, 4, 6)) * (torch.rand(2, 1, 4, 6) < 0.3)
    library = on_host(mods_of(None, lambda b, h, i, j: i >= j).text, tmp_path)
    data = of_blocks(kinds, (20, 12), 75, 70)
    kept = kinds[1, 0].repeat_interleave(20, 0).repeat_interleave(12, 1)[:75, :70]
    for row0 in range(0, 75, 16):
        for column0 in range(0, 70, 8):
            part = kept[row0 : row0 + 16, column0 : column0 + 8]
            assert library.touches(data, row0, 16, column0, 8) == bool(part.any())


@pytest.mark.parametrize("block", ((20, 12), (3, 5), (8, 16), (8, 8), (200, 100)), ids=str)
def test_tiles_of_strips(block: tuple[int, int], tmp_path: Path) -> None:
    """The next tile of a few rows, or of a few columns, that holds a score; and does a tile hold all."""
    rows, columns, size = 75, 70, 8
    shape = (2, 1, -(-rows // block[0]), -(-columns // block[1]))
    library = on_host(mods_of(None, lambda b, h, i, j: i >= j).text, tmp_path)
    for seed in range(4):
        torch.manual_seed(seed)
        kinds = torch.randint(1, 3, shape) * (torch.rand(shape) < (0.05, 0.3, 0.0, 0.9)[seed])
        data = of_blocks(kinds, block, rows, columns)
        of_elements = (
            kinds[1, 0].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
        )
        for find, is_whole, found in (
            (library.next_column_tile, library.whole_column_tile, of_elements),
            (library.next_row_tile, library.whole_row_tile, of_elements.T),
        ):
            end = -(-found.shape[1] // size)
            for first in range(0, found.shape[0], 16):
                tiles = [found[first : first + 16, n * size : (n + 1) * size] for n in range(end)]
                for tile in range(end + 1):
                    for last in (end, max(end - 3, tile)):
                        held = (n for n in range(tile, last) if tiles[n].any())
                        assert find(data, first, 16, tile, last) == next(held, last)
                    if tile < end:
                        assert is_whole(data, first, 16, tile) == bool((tiles[tile] == 2).all())


def test_indices_are_not_converted() -> None:
    """What is a sum of the query's and the key's numbers comes from their real numbers."""
    slopes = torch.rand(4)
    text = mods_of(lambda score, b, h, i, j: score + slopes[h] * (j - i + 3) * 0.5, None).text
    assert "(e.real_distance + R(3))" in scores_source(text).text
    assert "to_real(x" not in scores_source(text).text


SLOPES, OF_KEYS = torch.rand(4), torch.rand(60)
STEPS = {
    "alibi": (lambda s, b, h, i, j: s + SLOPES[h] * (j - i), "gather"),
    "negative": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j) / 2, "neg"),
    "of_rows": (lambda s, b, h, i, j: OF_KEYS[i] * j + s + OF_KEYS[i], "gather"),
    "constant": (lambda s, b, h, i, j: s - (3 * i - 3 * j) * 0.5, 1.5),
    "of_queries": (lambda s, b, h, i, j: s + SLOPES[h] * (j - 2 * i), "gather"),
    "none": (lambda s, b, h, i, j: s + SLOPES[h] * i, None),
    "distance": (lambda s, b, h, i, j: s - (i - j).abs(), None),
    "of_keys": (lambda s, b, h, i, j: s + OF_KEYS[j], None),
    "product": (lambda s, b, h, i, j: s * j, None),
    "square": (lambda s, b, h, i, j: s + j * j, None),
    "jump": (lambda s, b, h, i, j: torch.where(s > 0, s, s + 1.0) + j, None),
    "scaled": (lambda s, b, h, i, j: 2.0 * s + j, None),
    "rounded": (lambda s, b, h, i, j: s + j // 2, None),
}


OF_DISTANCE = ("alibi", "negative")


@pytest.mark.parametrize("name", STEPS)
def test_step_from_key_to_key(name: str) -> None:
    """It is found where all keys of a row have the same one, and the score is only added to."""
    score_mod, expected = STEPS[name]
    graph, score, *_ = slopes(mods_of(score_mod, None).text, None)
    step = key_step(graph, score)
    assert (None if step is None else step.constant or graph.nodes[step.number][0]) == expected
    assert is_of_distance(graph, score) == (name in OF_DISTANCE)


@pytest.mark.parametrize(
    ("function", "of_value", "of_slope"),
    (
        (lambda s, i, j: torch.sigmoid(s) * (i - j), False, False),
        (lambda s, i, j: torch.where(i > j, s, torch.tanh(s)), False, False),
        (lambda s, i, j: torch.where(s > 0.0, s, 0.0), True, True),
        (lambda s, i, j: (s > 0.0) * 1.0 + s, True, True),
        (lambda s, i, j: torch.abs(s), False, True),
        (lambda s, i, j: torch.exp(s) ** (1.0 * (i - j)), True, True),
    ),
)
def test_what_may_be_a_number_where_the_score_is_nan(function: Any, of_value: bool, of_slope: bool) -> None:
    graph, score, _, slope, *_ = slopes(mods_of(lambda s, b, h, i, j: function(s, i, j), None).text, None)
    assert hides_nan(graph, [score]) == of_value
    assert hides_nan(graph, [score, slope]) == of_slope


def test_gathers_by_row() -> None:
    """Only kernels for planes sum the gradient of a table that is indexed without the key."""
    case = mods.learned(2, 4, 37, 53, dtype=F64, device=CPU)
    text = mods_of(case.score_mod, case.mask_mod).text
    assert "EntryOf::kRow" not in scores_source(text, tables="floats").text
    assert "EntryOf::kRow" in scores_source(text, tables="floats", by_row=True).text


def test_sums_of_packed_sequences_are_compiled_once() -> None:
    """The programs of gradients by captured tensors do not depend on how many tokens there are."""
    case = mods.learned(2, 4, 37, 53, dtype=F64, device=CPU)
    traced = mods_of(case.score_mod, case.mask_mod, packed=True)
    gathers = tuple(n for n, node in enumerate(parse(traced.text).nodes) if node[0] == "gather")
    texts = set()
    for tokens in (60, 4000):
        tensors = [torch.zeros(tokens, 4).long() if t is LINES else t for t in traced.tensors]
        with torch.no_grad():
            *_, sizes = tables(tensors, torch.empty(0, dtype=F64), ())
        (sums,) = modified_sums(traced.text, tuple(sizes), gathers, True, True, 0.125, True, False)
        texts.add(sums.text)
    assert len(texts) == 1


KERNELS = [
    *(("sm80", which, width) for which in (FORWARD, BACKWARD) for width in (64, 128, 256)),
    *(("sm90", which, width) for which in (FORWARD, BACKWARD, BACKWARD_IN_TURN) for width in (64, 128)),
]
SAMPLE = ("sm80", FORWARD, 64), ("sm90", BACKWARD, 128)


@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
@pytest.mark.parametrize(("tier", "which", "width"), sampled(KERNELS, SAMPLE))
@pytest.mark.parametrize(
    "make",
    sampled((mods.alibi, mods.document, mods.learned, mods.relative_position), (mods.document,)),
    ids=lambda make: make.__name__,
)
def test_compiles_and_hardly_spills(
    nvrtc: None, make: Any, tier: str, which: str, width: int, packed: bool
) -> None:
    case = make(2, 4, 37, 53, dtype=torch.float32, device=CPU)
    text = mods_of(case.score_mod, case.mask_mod, packed=packed).text
    capability = (9, 0) if tier == "sm90" else (8, 0)
    steps = tier == "sm90"
    image = kernels.compiled_scores(text, which, packed, torch.bfloat16, width, tier, capability, steps)
    assert image.code.startswith(b"\x7fELF") and image.names[0].encode() in image.code
    # A bias that is gathered by positions within packed sequences spills more than others.
    most = 128 if (make, tier, width, packed) == (mods.relative_position, "sm90", 128, True) else 64
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= most, image.log
    assert "C75" not in image.log  # products that wait for each other


@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
@pytest.mark.parametrize(("tier", "which", "width"), sampled(KERNELS, SAMPLE))
def test_dropout_compiles_and_hardly_spills(
    nvrtc: None, tier: str, which: str, width: int, packed: bool
) -> None:
    text = mods_of(None, None, packed=packed, beside=(0.0, "", 0.1)).text
    capability = (9, 0) if tier == "sm90" else (8, 0)
    steps = tier == "sm90"
    image = kernels.compiled_scores(text, which, packed, torch.bfloat16, width, tier, capability, steps)
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 64, image.log
    assert "C75" not in image.log


# Blocks take turns in the deterministic mode alone, which adds no floats.
SUMS: dict[tuple[str, str], tuple[TableSum, ...]] = {
    ("sm80", BACKWARD): ("floats", "largest", "integers"),
    ("sm90", BACKWARD): ("floats",),
    ("sm90", BACKWARD_IN_TURN): ("largest", "integers"),
}


@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
@pytest.mark.parametrize(
    ("tier", "which", "width", "summed"),
    sampled(
        [(*kernel, summed) for kernel in KERNELS for summed in SUMS.get(kernel[:2], ())],
        (
            ("sm80", BACKWARD, 128, "integers"),
            ("sm90", BACKWARD, 64, "floats"),
            ("sm90", BACKWARD_IN_TURN, 64, "integers"),
        ),
    ),
)
@pytest.mark.parametrize("make", (mods.learned, mods.relative_position), ids=lambda make: make.__name__)
def test_gradients_of_tables_compile_and_hardly_spill(
    nvrtc: None, make: Any, tier: str, which: str, width: int, summed: TableSum, packed: bool
) -> None:
    case = make(2, 4, 37, 53, dtype=torch.float32, device=CPU)
    text = mods_of(case.score_mod, case.mask_mod, packed=packed).text
    assert "kGathers" in scores_source(text, tables=summed).text
    capability = (9, 0) if tier == "sm90" else (8, 0)
    steps = tier == "sm90"
    image = kernels.compiled_scores(
        text, which, packed, torch.bfloat16, width, tier, capability, steps, tables=summed
    )
    # Blocks that take turns leave few registers for packed sequences.
    most = 144 if (tier, which, width, packed) == ("sm90", BACKWARD_IN_TURN, 128, True) else 32
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= most, image.log
    assert "C75" not in image.log


@pytest.mark.parametrize("summed", (None, "floats", "integers"))
@pytest.mark.parametrize("packed", (False, True), ids=("batch", "packed"))
@pytest.mark.parametrize(
    ("which", "width"),
    sampled([(which, width) for which in (FORWARD, BACKWARD) for width in (64, 128)], ((BACKWARD, 128),)),
)
@pytest.mark.parametrize(
    "make",
    sampled((mods.alibi, mods.document, mods.learned, mods.relative_position), (mods.learned,)),
    ids=lambda make: make.__name__,
)
def test_planes_compile_and_hardly_spill(
    nvrtc: None, make: Any, which: str, width: int, packed: bool, summed: TableSum | None
) -> None:
    """Of a unit's kernels the last one repairs results, on ordinary cores."""
    case = make(2, 4, 37, 53, dtype=torch.float32, device=CPU)
    text = mods_of(case.score_mod, case.mask_mod, packed=packed, beside=(0.0, "", 0.1)).text
    of = summed if which == BACKWARD and case.captured else None
    image = kernels.compiled_scores(text, which, packed, torch.float32, width, "planes", (9, 0), tables=of)
    assert len(image.names) == (2 if which == FORWARD else 4)
    assert all(name.encode() in image.code for name in image.names)
    # The kernel for the gradient of q has few registers left at a width of 128.
    most = 64 if width == 64 or of is None else 128
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= most, image.log
    assert "C75" not in image.log


WEIGHTS = (
    lambda s: torch.sigmoid(s - 5.0),
    lambda s: torch.relu(s) ** 2,
    lambda s: s**4,
    lambda score, head, q_idx, kv_idx: torch.sigmoid(score - 0.1 * (head + 1) * (q_idx - kv_idx)),
)


@pytest.mark.parametrize(("tier", "which", "width"), sampled(KERNELS, SAMPLE))
@pytest.mark.parametrize(
    "weight", sampled(WEIGHTS, WEIGHTS[::3]), ids=("sigmoid", "relu2", "power", "indices")
)
def test_weights_compile_and_hardly_spill(
    nvrtc: None, weight: Any, tier: str, which: str, width: int
) -> None:
    mask = (lambda b, h, i, j: i >= j) if width == 128 else None
    text = mods_of(weight, mask, weights=True).text
    capability = (9, 0) if tier == "sm90" else (8, 0)
    image = kernels.compiled_scores(text, which, False, torch.bfloat16, width, tier, capability, weights=True)
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 64, image.log
    assert "C75" not in image.log


@pytest.mark.parametrize(
    ("which", "width"),
    sampled(
        [(which, width) for which in (FORWARD, BACKWARD) for width in (64, 128)],
        ((FORWARD, 64), (BACKWARD, 128)),
    ),
)
@pytest.mark.parametrize(
    "weight", sampled(WEIGHTS, WEIGHTS[::3]), ids=("sigmoid", "relu2", "power", "indices")
)
def test_weights_in_planes_compile_and_do_not_spill(nvrtc: None, weight: Any, which: str, width: int) -> None:
    text = mods_of(weight, lambda b, h, i, j: i >= j, weights=True).text
    image = kernels.compiled_scores(text, which, False, torch.float32, width, "planes", (9, 0), weights=True)
    assert len(image.names) == (2 if which == FORWARD else 4)
    assert all(name.encode() in image.code for name in image.names)
    assert max(int(bytes) for bytes in SPILLS.findall(image.log)) == 0, image.log
    assert "C75" not in image.log
