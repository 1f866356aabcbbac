"""SIMT kernels of attention by functions of scores: the host runs them in float64, NVRTC compiles them."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import host_jsd
import host_simt
import mods
import pytest
import torch
from dropout import dropped
from host_simt import scores_data
from modified_calls import dense_per_sequence
from mods import CASES, dense
from sampled import sampled
from specimens import starts
from torch import Tensor

import monoidreduce as mr
from monoidreduce._ops.attention_mask import packed_mask
from monoidreduce.folds.block_mask import linked
from monoidreduce.folds.cuda import compiler, kernels
from monoidreduce.folds.cuda.kernels import BACKWARD, FORWARD
from monoidreduce.folds.program.mods import LINES, Mods, mods_of, tables
from monoidreduce.folds.program.sequences import line_numbers

F64, CPU = torch.float64, torch.device("cpu")
SPILLS = re.compile(r"(\d+) bytes spill stores")
# B, H, Hkv, M, N, F, D: ragged tiles, one tile, grouped heads, values of two slices.
SHAPES = (
    (2, 2, 1, 70, 133, 5, 3),
    (1, 2, 2, 3, 64, 1, 2),
    (1, 1, 1, 65, 66, 37, 130),
)


def drawn(shape: tuple[int, ...]) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """q, k and v, and gradients by out and lse."""
    torch.manual_seed(0)
    B, H, Hkv, M, N, F, D = shape
    sizes = ((B, H, M, F), (B, Hkv, N, F), (B, Hkv, N, D), (B, H, M, D), (B, H, M))
    q, k, v, grad_out, grad_lse = (torch.randn(size, dtype=F64) for size in sizes)
    return (q, k, v), (grad_out, grad_lse)


def expected(
    call: Any, tensors: tuple[Tensor, Tensor, Tensor], upstream: tuple[Tensor, Tensor], weights: bool = False
) -> list[Tensor]:
    """out, lse and the gradients, by torch. call: takes q, k and v. weights: lse is none."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    out, lse = call(*leaves)
    results = (out,) if weights else (out, lse.masked_fill(lse == -math.inf, 0))
    gradients = torch.autograd.grad(
        results, leaves, upstream[: len(results)], allow_unused=True, materialize_grads=True
    )
    return [out.detach(), lse.detach(), *gradients]


def assert_near(found: list[Tensor], right: list[Tensor], weights: bool = False) -> None:
    for number, (ours, theirs) in enumerate(zip(found, right, strict=True)):
        if number != 1 or not weights:
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)


def tables_of(traced: Mods, captured: Any) -> tuple[tuple[Tensor | None, Tensor | None], list[int]]:
    with torch.no_grad():
        real, integer, sizes = tables(captured, torch.empty(0, dtype=F64), ())
    return (real, integer), sizes


@pytest.mark.parametrize("make", sampled(CASES, CASES[:2]), ids=lambda make: make.__name__)
def test_functions(make: Any, tmp_path: Path) -> None:
    """Forward and backward, as every tile adds and in a fixed order, and within bands."""
    libraries: dict[str, Any] = {}  # by texts: a function may read a length as a constant
    for shape in SHAPES:
        B, H, _, M, N, F, _ = shape
        case = make(B, H, M, N, dtype=F64, device=CPU)
        traced = mods_of(case.score_mod, case.mask_mod)
        if traced.text not in libraries:
            libraries[traced.text] = host_simt.compiled(traced.text, tmp_path / str(len(libraries)))
        library = libraries[traced.text]
        scores = scores_data(*tables_of(traced, traced.tensors), (M, N))
        tensors, upstream = drawn(shape)
        for window, deterministic in (((-1, -1), False), ((40, 3), True), ((-1, 0), False)):
            found = host_simt.attention(
                library, tensors, upstream, scores, window=window, scale=F**-0.5, deterministic=deterministic
            )
            band = tuple(None if bound < 0 else bound for bound in window)
            call = lambda *t, case=case, band=band: dense(*t, *case[:2], window=band)  # noqa: E731
            assert_near(found, expected(call, tensors, upstream))


# Of the captured tensors, the one that is indexed by the key: with the query, or by itself.
@pytest.mark.parametrize(
    ("make", "by_key"), ((mods.relative_position, 0), (mods.learned, 1)), ids=("both", "key")
)
def test_gradient_of_tables(make: Any, by_key: int, tmp_path: Path) -> None:
    for number, shape in enumerate(SHAPES):
        B, H, _, M, N, F, _ = shape
        case = make(B, H, M, N, dtype=F64, device=CPU)
        traced = mods_of(case.score_mod, case.mask_mod)
        of_tables, sizes = tables_of(traced, traced.tensors)
        library = host_simt.compiled(traced.text, tmp_path / str(number), tables=True)
        tensors, upstream = drawn(shape)
        for window in ((-1, -1), (40, 3)):
            d_table = torch.zeros_like(of_tables[0])
            scores = scores_data(of_tables, sizes, (M, N), d_table=d_table)
            found = host_simt.attention(
                library, tensors, upstream, scores, window=window, scale=F**-0.5, deterministic=False
            )
            band = tuple(None if bound < 0 else bound for bound in window)
            call = lambda *t, case=case, band=band: dense(*t, *case[:2], window=band)  # noqa: E731
            assert_near(found, expected(call, tensors, upstream))
            out, lse = call(*tensors)
            leaf = case.captured[by_key]
            (right,) = torch.autograd.grad((out, lse.masked_fill(lse == -math.inf, 0)), leaf, upstream)
            reals = [right if t is leaf else torch.zeros_like(t) for t in traced.tensors]
            expected_table, _ = tables_of(traced, reals)
            torch.testing.assert_close(d_table, expected_table[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("given", (False, True), ids=("constant", "tensor"))
def test_dropout(given: bool, tmp_path: Path) -> None:
    """Forward and backward drop the same elements, also by a probability that is an input of the call."""
    p = 0.3
    probability, seed = torch.tensor(p, dtype=F64), torch.tensor(2**40 + 7)
    traced = mods_of(None, None, beside=(0.0, "", probability if given else p))
    library = host_simt.compiled(traced.text, tmp_path)
    captured = [t if t is probability else seed for t in traced.tensors]
    for shape in SHAPES:
        _, H, _, M, N, F, _ = shape
        of_tables = tables(captured, torch.empty(0, dtype=F64), (), (H,))
        scores = scores_data(of_tables[:2], of_tables[2], (M, N))
        tensors, upstream = drawn(shape)
        for window, deterministic in (((-1, -1), False), ((40, 3), True)):
            found = host_simt.attention(
                library, tensors, upstream, scores, window=window, scale=F**-0.5, deterministic=deterministic
            )
            band = tuple(None if bound < 0 else bound for bound in window)
            options: Any = {"dropout_p": p, "seed": int(seed), "window": band, "return_lse": True}
            call = lambda *t, options=options: dropped(*t, **options)  # noqa: E731
            assert_near(found, expected(call, tensors, upstream))


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_libraries_of_a_process_share_no_statics(tmp_path: Path) -> None:
    """The loader would give all libraries the block of threads of the first one, which may have fewer."""
    traced = mods_of(lambda score, b, h, i, j: 2.0 * score, None)
    for library in (host_simt.compiled(traced.text, tmp_path / "scores"), host_jsd.compiled(tmp_path)):
        listed = subprocess.run(["nm", "-D", library._name], check=True, capture_output=True, text=True)
        kinds = {line.split()[-1]: line.split()[-2] for line in listed.stdout.splitlines()}
        assert "T" in kinds.values()
        assert not [name for name, kind in kinds.items() if kind == "u"]  # unique in a process


def of_indices(score: Any, kv_idx: Any, head: Any) -> Any:
    return torch.tanh(score) * (1.0 + 0.25 * head) - 0.02 * kv_idx


@pytest.mark.parametrize(
    "weight", (lambda s: 1.0 + torch.tanh(s) - 0.5 * s, of_indices), ids=("score", "indices")
)
@pytest.mark.parametrize("masked", (False, True))
def test_weights(masked: bool, weight: Any, tmp_path: Path) -> None:
    """The weights of attend may be negative, and are not 0 beyond the last key."""
    mask = (lambda b, h, i, j: (i + j) % 5 != 1) if masked else None
    traced, shape = mods_of(weight, mask, weights=True), SHAPES[0]
    library = host_simt.compiled(traced.text, tmp_path, weights=True)
    tensors, upstream = drawn(shape)
    scores = scores_data((None, None), [], shape[3:5])
    options: dict[str, Any] = {"scale": -0.3, "deterministic": False}
    found = host_simt.attention(library, tensors, upstream, scores, **options)
    kv_idx, head = torch.arange(shape[4], dtype=F64), torch.arange(shape[1], dtype=F64)[:, None, None]
    of = weight if weight is not of_indices else lambda s: of_indices(s, kv_idx, head)
    call = lambda *t: dense(*t, None, mask, weight=of, scale=-0.3)  # noqa: E731
    assert_near(found, expected(call, tensors, upstream, weights=True), weights=True)


def test_sinks(tmp_path: Path) -> None:
    """One more element of each row, of value 0; also of rows that keep no key."""
    B, H, _, M, N, F, _ = shape = SHAPES[0]
    case = mods.nothing_kept(B, H, M, N, dtype=F64, device=CPU)
    traced = mods_of(case.score_mod, case.mask_mod)
    library = host_simt.compiled(traced.text, tmp_path)
    tensors, upstream = drawn(shape)
    sinks = torch.randn(H, dtype=F64)
    scores = scores_data(*tables_of(traced, traced.tensors), (M, N))
    options: dict[str, Any] = {"sinks": sinks, "scale": F**-0.5, "deterministic": False}
    found = host_simt.attention(library, tensors, upstream, scores, **options)

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = dense(*leaves, *case[:2])
        joined = torch.logaddexp(lse, sinks[:, None])
        return out * (lse - joined).exp()[..., None], joined

    assert_near(found, expected(call, tensors, upstream))


@pytest.mark.parametrize("block", ((32, 16), (128, 128)), ids=str)
def test_blocks(block: tuple[int, int], tmp_path: Path) -> None:
    """Tiles whose blocks keep nothing are skipped, whatever the mask says."""
    B, H, _, M, N, F, _ = shape = (2, 2, 1, 150, 300, 8, 8)
    mask = lambda b, h, i, j: ((i // 64 - j // 64) % 3 == 1) & (h != b)  # noqa: E731
    traced = mods_of(None, mask)
    library = host_simt.compiled(traced.text, tmp_path)
    blocks = mr.block_mask(mask, B, H, M, N, block_size=block)
    scores = scores_data((None, None), [], (M, N), blocks.links, block)
    tensors, upstream = drawn(shape)
    right = expected(lambda *t: dense(*t, None, mask), tensors, upstream)
    for deterministic in (False, True):
        options: dict[str, Any] = {"scale": F**-0.5, "deterministic": deterministic}
        assert_near(host_simt.attention(library, tensors, upstream, scores, **options), right)
    words = linked(torch.zeros_like(blocks.kinds))
    none = scores_data((None, None), [], (M, N), words, block)
    out, lse, *gradients = host_simt.attention(library, tensors, upstream, none, **options)
    assert bool((lse == -math.inf).all()) and not any(t.any() for t in (out, *gradients))


def test_packed_sequences(tmp_path: Path) -> None:
    """Listed spans; functions see positions within sequences."""
    of_queries, of_keys = (5, 0, 71, 3), (9, 4, 130, 0)
    size = (len(of_queries), 2, max(of_queries), max(of_keys))
    case = mods.learned(*size, dtype=F64, device=CPU)
    traced = mods_of(case.score_mod, case.mask_mod, packed=True)
    tensors, upstream = drawn((1, 2, 1, sum(of_queries) + 4, sum(of_keys) + 2, 5, 3))
    q, k, _ = tensors
    numbers = [starts(lengths, CPU) for lengths in (of_queries, of_keys)]
    mask = packed_mask(q, k, numbers[0], numbers[1], (-1, -1))
    spans = (mask.row_spans, mask.column_spans)
    lines = line_numbers(*numbers, max(q.shape[2], k.shape[2]))
    captured = [lines if tensor is LINES else tensor for tensor in traced.tensors]
    library = host_simt.compiled(traced.text, tmp_path)
    scores = scores_data(*tables_of(traced, captured), (q.shape[2], k.shape[2]))
    options: dict[str, Any] = {"spans": spans, "scale": 5**-0.5, "deterministic": False}
    found = host_simt.attention(library, tensors, upstream, scores, **options)

    def call(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        packed = (t[0].transpose(0, 1) for t in leaves)
        out, lse = dense_per_sequence(*packed, (of_queries, of_keys), case)
        return out.transpose(0, 1)[None], lse[None]

    assert_near(found, expected(call, tensors, upstream))


def assert_hardly_spills(text: str, which: str, dtype: torch.dtype, **options: bool) -> None:
    for capability in ((8, 0), (9, 0)):
        image = kernels.compiled_scores(text, which, False, dtype, 0, "simt", capability, **options)
        assert image.code.startswith(b"\x7fELF") and image.names[0].encode() in image.code
        assert max(int(bytes) for bytes in SPILLS.findall(image.log)) <= 64, image.log


@pytest.fixture
def nvrtc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    if compiler.find() is None:
        pytest.skip("no NVRTC: pip install --group nvrtc")


@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
@pytest.mark.parametrize("which", (FORWARD, BACKWARD))
@pytest.mark.parametrize(
    "make",
    sampled((mods.alibi, mods.document, mods.learned, mods.relative_position), (mods.document,)),
    ids=lambda make: make.__name__,
)
def test_compiles_and_hardly_spills(nvrtc: None, make: Any, which: str, dtype: torch.dtype) -> None:
    case = make(2, 4, 37, 53, dtype=torch.float32, device=CPU)
    assert_hardly_spills(mods_of(case.score_mod, case.mask_mod).text, which, dtype)


WEIGHTS = (lambda s: torch.sigmoid(s - 5.0), lambda s: torch.relu(s) ** 2, lambda s: s**4, of_indices)


@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
@pytest.mark.parametrize("which", (FORWARD, BACKWARD))
@pytest.mark.parametrize(
    "weight", sampled(WEIGHTS, WEIGHTS[:1]), ids=("sigmoid", "relu2", "power", "indices")
)
def test_weights_compile_and_hardly_spill(nvrtc: None, weight: Any, which: str, dtype: torch.dtype) -> None:
    text = mods_of(weight, lambda b, h, i, j: i >= j, weights=True).text
    assert_hardly_spills(text, which, dtype, weights=True)


def test_one_kernel_for_all_dtypes_of_float32_sums(nvrtc: None) -> None:
    """The kernel is told the dtype of the operands at run time."""
    text = mods_of(None, lambda b, h, i, j: i >= j).text
    first, second = (
        kernels.compiled_scores(text, FORWARD, False, dtype, 0, "simt", (8, 0))
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert first.code == second.code
