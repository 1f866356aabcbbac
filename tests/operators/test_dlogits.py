"""The dlogits of how many classes a forward pass saves, and where a backward pass computes the others."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monoidreduce._ops import dlogits
from monoidreduce._ops.dlogits import (
    UNIT_UPSTREAM,
    Head,
    HeadSlice,
    UniformUpstream,
    Upstream,
    multiply_dlogits,
    unit_of,
)
from monoidreduce._ops.products import SUMS_IN_FLOAT32, add_product, write_product
from monoidreduce._ops.slices import Needed, Space, columns_to_save, leaves_clusters_idle, slices

TILE = 256  # classes
RESERVE = 128 << 20  # bytes that the others are computed in
ROWS = 8192


def upstream_of(grad: Tensor, slope: float, uniform: bool) -> Upstream | UniformUpstream:
    """grad: [N]."""
    unit = unit_of(slope)
    if not uniform:
        return Upstream(grad, unit)
    return UniformUpstream(unit * grad, unit * grad[:1])


@pytest.mark.parametrize("scores", (1, 2))
@pytest.mark.parametrize("columns", (128256, 50257, 256, 1))
def test_all_are_saved_where_they_fit(columns: int, scores: int) -> None:
    whole = 2 * ROWS * columns * scores
    assert columns_to_save(ROWS, columns, whole, scores=scores) == columns
    assert columns_to_save(ROWS, columns, whole - 1, scores=scores) < columns


def test_others_have_room_to_be_computed_in() -> None:
    """Beyond the reserve, each tile that fits is a tile that is not computed again."""
    of_tile = 2 * ROWS * TILE
    assert columns_to_save(ROWS, 128256, RESERVE) == 0
    kept = [columns_to_save(ROWS, 128256, RESERVE + n * of_tile) for n in range(100)]
    assert kept == [n * TILE for n in range(100)]


def test_rows_of_2048_elements_are_room_enough() -> None:
    """The whole workspace holds kept local gradients where the rows' gradient has room for the others."""
    of_tile = 2 * ROWS * TILE
    assert columns_to_save(ROWS, 128256, 10 * of_tile, room=2047) == 0
    assert columns_to_save(ROWS, 128256, 10 * of_tile, room=2048) == 10 * TILE
    assert columns_to_save(ROWS, 128256, 10 * of_tile, room=2048, scores=2) == 5 * TILE


@pytest.mark.parametrize("scores", (1, 2))
@pytest.mark.parametrize("workspace", (0, 1, 1 << 20, 100 << 20, 300 << 20, 1 << 30, 2 << 30, 5 << 30))
def test_either_pass_stays_within_the_workspace(workspace: int, scores: int) -> None:
    columns = 128256
    kept = columns_to_save(ROWS, columns, workspace, scores=scores)
    assert 2 * ROWS * kept * scores <= workspace  # of the forward pass
    if 0 < kept < columns:
        assert kept % TILE == 0
        left = workspace - 2 * ROWS * kept  # of the backward pass
        assert left >= RESERVE - 2 * ROWS * TILE


@pytest.mark.parametrize("terms", (0, 1, 9, 264))
@pytest.mark.parametrize(
    "dtype, total_dtype",
    (
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ),
    ids=str,
)
def test_a_first_product_does_not_read_the_sum(
    dtype: torch.dtype, total_dtype: torch.dtype, terms: int, device: torch.device
) -> None:
    """Whatever was in its memory, dense or a part of its columns. Small integers have exact sums."""
    a = torch.randint(-1, 2, (24, terms), device=device).to(dtype)
    b = torch.randint(-1, 2, (40, terms), device=device).to(dtype).T
    exact = a.double() @ b.double()
    bias = torch.ones(40, dtype=total_dtype, device=device)
    for columns in (40, 64):
        total = torch.full((24, columns), torch.nan, dtype=total_dtype, device=device)[:, :40]
        add_product(total, a, b, first=True)
        assert torch.equal(total.double(), exact)
        add_product(total, a, b)
        assert torch.equal(total.double(), 2 * exact)
        for given in (None, bias):
            total.fill_(torch.nan)
            write_product(total, a, b, given)
            assert torch.equal(total.double(), exact if given is None else exact + 1)


@pytest.mark.parametrize(("rows", "columns"), ((0, 10), (10, 0)))
def test_nothing_is_saved_of_nothing(rows: int, columns: int) -> None:
    assert columns_to_save(rows, columns, 1 << 40) == 0


def written(heads: list[HeadSlice]) -> Tensor:
    """Where the dlogits of the only head go."""
    (head,) = heads
    assert head.dlogits is not None
    return head.dlogits


WANTED = {"both": [True, True], "rows": [True, False], "columns": [False, True], "none": [False, False]}


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("added", (False, True), ids=("written", "added"))
@pytest.mark.parametrize("own_tiles", (1, 3, 100))
@pytest.mark.parametrize(
    ("rows", "columns", "width"),
    ((64, 3333, 512), (300, 2048, 16), (700, 1111, 712), (40, 100, 8), (40, 5, 8), (8, 5000, 64)),
)
def test_gradients_are_not_written_over_before_they_are_done(
    rows: int,
    columns: int,
    width: int,
    own_tiles: int,
    wanted: list[bool],
    added: bool,
) -> None:
    """Whatever local gradients share memory with, both products are products of all local gradients."""
    shapes = ((rows, width), (columns, width), (rows, columns))
    a, b, exact = (torch.randint(-3, 4, shape).float() for shape in shapes)  # sums are exact in any order
    sums = torch.ones_like(b) if added and wanted[1] else None
    head = Head(a, b, Needed(*wanted), clusters=0, own_columns=own_tiles * TILE, column_sums=sums)
    parts: list[slice] = []

    def store(part: slice, heads: list[HeadSlice]) -> None:
        parts.append(part)
        to = written(heads)
        assert to.stride(0) % 8 == 0
        to.copy_(exact[:, part])

    (found,) = multiply_dlogits([head], store)
    if sums is not None:
        assert found.columns is sums
        sums -= 1
    stops, starts = [part.stop for part in parts], [part.start for part in parts]
    assert stops == [columns, *starts[:-1]] and starts[-1] == 0
    assert all(start % TILE == 0 for start in starts)
    d_rows, d_columns, _ = found
    assert [d_rows is not None, d_columns is not None] == wanted
    if d_rows is not None:
        assert torch.equal(d_rows, exact @ b)
    if d_columns is not None:
        assert torch.equal(d_columns, exact.T @ a)


@pytest.fixture(params=("kernel", "torch"))
def products_of_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What Hopper's kernels compute where all rows count, on a GPU of 132 multiprocessors.

    They add to sums in float32, and write to gradients, whose type is another. "torch" multiplies dX as where
    its tiles are few.
    """

    def rows_product(
        local: Tensor,
        columns: Tensor,
        factor: Tensor | None,
        out: Tensor,
        order: Tensor | None,
        adds: bool,
    ) -> None:
        assert order is None
        product = (1 if factor is None else factor[:, None]) * (local @ columns)
        out.copy_(out + product if adds else product)

    def columns_product(
        local: Tensor,
        rows: Tensor,
        scale: Tensor | None,
        out: Tensor,
        order: Tensor | None,
    ) -> None:
        before = local.clone()
        product = (1 if scale is None else scale) * (local.T @ rows)
        out.copy_(out + product if out.dtype == torch.float32 else product)
        assert torch.equal(local, before)

    monkeypatch.setattr(dlogits, "_rows_product", rows_product)
    monkeypatch.setattr(dlogits, "leaves_clusters_idle", lambda *_: request.param == "torch")
    monkeypatch.setattr(dlogits, "_columns_product", columns_product)

    def scale_rows(
        rows: Tensor, factor: Tensor, out: Tensor, order: Tensor | None, *, scatters: bool = False
    ) -> Tensor:
        assert not scatters
        return out.copy_(rows * factor[:, None])

    monkeypatch.setattr(dlogits, "scale_rows", scale_rows)


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
@pytest.mark.parametrize("added", (False, True), ids=("written", "added"))
@pytest.mark.parametrize("uniform", (False, True), ids=("of_rows", "uniform"))
@pytest.mark.parametrize("kept_tiles", (1, 20))
@pytest.mark.parametrize(
    ("rows", "columns", "width"), ((130, 1300, 304), (64, 1444, 512), (16, 3333, 32), (260, 1005, 104))
)
def test_saved_dlogits_are_multiplied_after_the_others(
    rows: int,
    columns: int,
    width: int,
    kept_tiles: int,
    uniform: bool,
    wanted: list[bool],
    added: bool,
    products_of_hopper: None,
) -> None:
    """Some or all are kept; they may be multiplied again, with other upstream gradients."""
    first = min(kept_tiles * TILE, columns)
    shapes = ((rows, width), (columns, width), (rows, columns))
    a, b, exact = (torch.randint(-3, 4, shape).double() for shape in shapes)
    saved = UNIT_UPSTREAM * exact[:, :first]
    for factor in (2.0, -1.0):
        upstream = factor * (torch.ones(rows) if uniform else torch.randint(-2, 3, (rows,)).float())
        local = UNIT_UPSTREAM * exact if uniform else upstream[:, None] * exact
        sums = torch.ones_like(b, dtype=torch.float32) if added and wanted[1] else None
        head = Head(
            a,
            b,
            Needed(*wanted),
            clusters=66,
            own_columns=TILE,
            saved=saved,
            upstream=upstream_of(upstream, 1.0, uniform),
            column_sums=sums,
        )
        starts = [columns]

        def store(
            part: slice, heads: list[HeadSlice], local: Tensor = local, starts: list[int] = starts
        ) -> None:
            assert part.stop == starts[-1]
            starts.append(part.start)
            written(heads).copy_(local[:, part])

        ((d_rows, d_columns, _),) = multiply_dlogits([head], store)
        assert starts[-1] == first
        expected = upstream[:, None] * exact
        assert [d_rows is not None, d_columns is not None] == wanted
        if d_rows is not None:
            assert torch.equal(d_rows, expected @ b)
        if d_columns is not None:
            assert (d_columns is sums) == added
            assert torch.equal(d_columns.double() - int(added), expected.T @ a)


def test_slices_fill_the_last_wave_of_tiles() -> None:
    """On 66 clusters 32 blocks of rows by 33 tiles of columns are 16 waves, and 33 by 16 are 8."""
    space = Space.of(ROWS, 128256, 4096, 0, 0, Needed(True, True), gathers=False)
    tiles, stop = [], space.columns
    for part in slices([space], clusters=66):
        assert part.stop == stop and 0 < stop - part.start <= space.fitting(stop)
        stop = part.start
        tiles.append((part.stop - stop) // TILE)
    assert sum(tiles) * TILE == space.columns
    assert tiles[:3] == [165, 99, 66]


def test_memory_is_taken_only_where_gradients_have_none() -> None:
    """Rows of 512 elements are room for two tiles of columns; more than the workspace has."""
    a, b = torch.randn(64, 512), torch.randn(4096, 512)
    held = []

    def store(part: slice, heads: list[HeadSlice]) -> None:
        written(heads).zero_()

    for wanted in ([True, True], [True, False], [False, True]):
        head = Head(a, b, Needed(*wanted), clusters=0, own_columns=TILE)
        multiply_dlogits([head], store)
        held.append(head.own is not None)
    assert held == [False, False, True]


def test_sums_of_columns_limit_the_parts() -> None:
    """Each part's sums are of as many columns as there is memory for, however much room the products have."""
    a, b = torch.randn(64, 512), torch.randn(4096, 512)
    head = Head(a, b, Needed(True, True, True), clusters=0, own_columns=TILE)
    parts: list[slice] = []

    def store(part: slice, heads: list[HeadSlice]) -> None:
        parts.append(part)
        written(heads).zero_()
        sums = heads[0].bias_sums
        assert sums is not None
        sums[:] = 1

    (found,) = multiply_dlogits([head], store)
    assert all(part.stop - part.start == TILE for part in parts)
    assert found.bias is not None and (found.bias == 16).all()


@pytest.mark.parametrize(
    ("rows", "width", "clusters", "idle"),
    [
        (256, 512, 66, True),
        (512, 4096, 66, True),  # 44 tiles of 192 columns
        (1024, 4096, 66, False),  # 64 tiles of 256 columns
        (8192, 4096, 66, False),
        (256, 512, 2, False),
        (1 << 20, 128, 66, False),  # tiles are half empty, but many
        (1 << 20, 264, 66, False),
        (256, 512, 0, False),  # torch multiplies in any case
    ],
)
def test_few_tiles_leave_clusters_idle(rows: int, width: int, clusters: int, idle: bool) -> None:
    assert leaves_clusters_idle(rows, width, clusters) == idle


@pytest.mark.skipif(not SUMS_IN_FLOAT32, reason="torch before 2.8")
def test_the_deterministic_mode_takes_the_kernel_for_any_dx() -> None:
    """torch's product would raise RuntimeError there, without the setting that cuBLAS needs."""

    def by_torch() -> bool:
        rows, columns = torch.randn(256, 64).bfloat16(), torch.randn(300, 64).bfloat16()
        return Head(rows, columns, Needed(True, True), clusters=66, own_columns=TILE).rows_by_torch

    assert by_torch()
    torch.use_deterministic_algorithms(True)
    try:
        assert not by_torch()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not SUMS_IN_FLOAT32, reason="torch before 2.8")
@pytest.mark.parametrize("counted", (0, 5, 9))
@pytest.mark.parametrize(
    ("saved_columns", "uniform"), ((0, True), (8, True), (20, True), (20, False)), ids=str
)
@pytest.mark.parametrize("unrounded", (False, True))
def test_rows_that_torch_multiplies(
    counted: int, saved_columns: int, uniform: bool, unrounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Factors come last. Dlogits of rows that are not active, or have the factor 0, may be NaN."""

    def scale_rows(
        rows: Tensor, factor: Tensor | None, out: Tensor, order: Tensor, *, scatters: bool = False
    ) -> Tensor:
        for i, row in enumerate(order[:-1]):
            to, of = (row, i) if scatters else (i, row)
            scaled = rows[of] if factor is None else factor[i] * rows[of]
            out[to] = scaled if i < order[-1] and (factor is None or factor[i] != 0) else 0
        return out

    monkeypatch.setattr(dlogits, "scale_rows", scale_rows)
    monkeypatch.setattr(dlogits, "gather_rows", lambda rows, order, out: scale_rows(rows, None, out, order))
    monkeypatch.setattr(dlogits, "leaves_clusters_idle", lambda *_: True)
    monkeypatch.setattr(dlogits, "_rows_product", None)
    rows, weight, local = torch.randn(9, 16), torch.randn(20, 16), torch.randn(9, 20)
    order = torch.cat([torch.randperm(9), torch.tensor([counted])])
    local[counted:] = torch.nan
    product = torch.zeros(9, 16, dtype=torch.float64)
    product[order[:counted]] = local[:counted].double() @ weight.double()
    uneven = torch.randn(9)
    uneven[order[1]] = 0
    if not uniform:
        local[1] = product[order[1]] = torch.nan
    for upstream in (-3.0, 0.0):
        grad = torch.tensor(upstream).expand(9) if uniform else upstream * uneven
        head = Head(
            rows,
            weight,
            Needed(True, False),
            clusters=66,
            own_columns=TILE,
            saved=local[:, :saved_columns],
            upstream=upstream_of(grad, 2.0, uniform),
            order=order,
            unrounded=unrounded,
        )
        ((found, _, _),) = multiply_dlogits([head], lambda part, heads: written(heads).copy_(local[:, part]))
        assert found is not None
        factor = grad[:, None].double() * 2.0 / UNIT_UPSTREAM
        expected = torch.where(factor == 0, 0, factor * product)
        torch.testing.assert_close(found, expected.float())
