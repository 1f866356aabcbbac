"""The GPU kernels of a program: source, compiled once and cached on disk, loaded once per process.

Program -> cuda_source (C++) -> compiler (NVRTC) -> cache (disk) -> ahead (threads) -> _C.load_kernels
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from monoidreduce import _C
from monoidreduce._ops.engine import user_kernels
from monoidreduce._paths import get_include
from monoidreduce.folds.cuda import ahead, cache, compiler
from monoidreduce.folds.cuda.cache import Image
from monoidreduce.folds.cuda.cuda_source import (
    Source,
    TableSum,
    fold_source,
    gradient_source,
    pulled_source,
    scores_source,
    state_words,
)
from monoidreduce.folds.operands import Counts
from monoidreduce.folds.program.integers import FEW

__all__ = [
    "BACKWARD",
    "BACKWARD_IN_TURN",
    "FORWARD",
    "capability_of",
    "compiled",
    "compiled_payload",
    "compiled_row_gradient",
    "compiled_scores",
    "compiled_unit",
    "fold_kernels",
    "gradient_kernels",
    "handle_of",
    "hash_of_headers",
    "is_available",
    "payload_kernels",
    "row_gradient_kernel",
    "scores_kernel",
]

Widths = tuple[int, int]  # widths of the operands of both scores; 0 for the second if there is only one
Owned = tuple[int, int, int]  # for kernels whose threads own rows: both widths, and lanes that share a row

_UNIT = """\
#include <cuda_bf16.h>
#include <cuda_fp16.h>

{includes}
namespace monoidreduce {{

{program}
using P = Program<{real}>;
{checks}
}}  // namespace monoidreduce
"""
_HERE = "monoidreduce::"
_ELEMENTS = {torch.bfloat16: "__nv_bfloat16", torch.float16: "__half"}
_FOLD, _GRADIENT, _GRADIENT_OF_FIRST = "fold", "gradient", "gradient of first"
FORWARD, BACKWARD, BACKWARD_IN_TURN = "forward", "backward", "backward in turn"
_ROW_BLOCK = 256  # of all folds but those of few rows on Hopper
_WIDTHS = (64, 128, 256)  # tile widths of attention with modified scores on tensor cores
_ANY_WIDTH = 0
_LEAST_SCALE = 2.0**-32  # smallest scale that steps may be divided by


_capability_of = lru_cache(64)(torch.cuda.get_device_capability)


def capability_of(device: int) -> tuple[int, int]:
    """The compute capability of a device; in a dry run, that of the GPU that the dry run plans for."""
    return user_kernels.capability or _capability_of(device)


def handle_of(*unit: Any) -> int:
    """The handle of the first kernel of a unit, which is loaded once for all GPUs. A dry run notes the unit,
    and returns 0.

    unit: a function that returns an `Image`, such as `compiled`, and its arguments.
    """
    if user_kernels.load:
        return _loaded(*unit)
    user_kernels.units.append(unit)
    return 0


@lru_cache(1024)
def _loaded(*unit: Any) -> int:
    image = ahead.image_of(unit)
    return _C.load_kernels(image.code, list(image.names))


def is_available() -> bool:
    """Whether NVRTC is available to compile kernels."""
    return user_kernels.assumed or compiler.find() is not None


def fold_kernels(
    program: str, counts: Counts, dtype: torch.dtype, plan: _C.Plan, widths: Widths, device: int
) -> int:
    """The handle of the kernel that folds rows; a second kernel, if any, combines partial states."""
    owned = None if plan.owned_rows is None else _owned(widths, plan.owned_rows.lanes, dtype)
    capability = capability_of(device)
    return handle_of(
        compiled, _FOLD, program, counts, dtype, plan.tier, capability, owned, row_block_of(plan)
    )


def row_block_of(plan: _C.Plan) -> int:
    """Rows of a tile of a fold on tensor cores; of others any number."""
    return plan.tile[0] if plan.tile else _ROW_BLOCK


def gradient_kernels(
    program: str, counts: Counts, dtype: torch.dtype, plan: _C.Plan, device: int, of_first: bool
) -> int:
    """The handle of the kernel that writes gradients of scores. counts: those of the forward pass.

    of_first: only for the first of two scores, on tensor cores.
    """
    which = _GRADIENT_OF_FIRST if of_first else _GRADIENT
    return handle_of(compiled, which, program, counts, dtype, plan.tier, capability_of(device))


def payload_kernels(
    program: str,
    counts: Counts,
    counted: tuple[int, ...],
    slabs: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    plan: _C.Plan,
    device: int,
) -> int:
    """The handle of the first of the kernels that fold rows with payload sums. Arguments as in
    `compiled_payload`."""
    capability = capability_of(device)
    return handle_of(compiled_payload, program, counts, counted, slabs, dtype, plan.tier, capability)


def compiled_payload(
    program: str,
    counts: Counts,
    counted: tuple[int, ...],
    slabs: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    tier: str,
    capability: tuple[int, int],
) -> Image:
    """The kernels that fold a program with payload sums.

    Args:
        program, counts, dtype, tier, capability: as in `compiled`.
        counted: as in `cuda_source.fold_source`.
        slabs: for each kernel its slabs of the payload sums, each by the number of its sum.
    """
    found = compiler.find()
    assert found is not None
    text = _UNIT.format(
        includes=f'#include "monoidreduce/device/resident/fold_payload_{tier}.cuh"\n',
        program=fold_source(program, *counts, counted).text,
        real="ElementReal",
        checks="",
    )
    family = f"{_HERE}{tier}::"
    of_kernels = (f"{family}PayloadSlabs<{', '.join(map(str, of_kernel))}>" for of_kernel in slabs)
    names = [f"{family}fold_payload_kernel<{_ELEMENTS[dtype]}, {_HERE}P, {of}>" for of in of_kernels]
    return compiled_unit(found, text, names, tier, capability)


def row_gradient_kernel(
    program: str,
    counts: Counts,
    of_columns: bool,
    operands: bool,
    data: tuple[int, ...],
    dtype: torch.dtype,
    plan: _C.Plan,
    widths: Widths,
    device: int,
) -> int:
    """The handle of the kernel that sums gradients of rows. Arguments as in `compiled_row_gradient`."""
    assert plan.owned_rows is not None
    owned = _owned(widths, plan.owned_rows.lanes, dtype)
    of, capability = (of_columns, operands, data), capability_of(device)
    return handle_of(compiled_row_gradient, program, counts, *of, dtype, owned, capability, plan.tier)


def _owned(widths: Widths, lanes: int, dtype: torch.dtype) -> Owned:
    """The widths for kernels whose threads own rows, rounded up to whole 16-byte vectors for each lane."""
    numbers = lanes * 16 // (8 if dtype == torch.float64 else 4)
    first, second = (-(-width // numbers) * numbers for width in widths)
    return first, second, lanes


def compiled(
    which: str,
    program: str,
    counts: Counts,
    dtype: torch.dtype,
    tier: str,
    capability: tuple[int, int],
    owned: Owned | None = None,
    row_block: int = _ROW_BLOCK,
) -> Image:
    """The kernels of a pass, from the cache or the compiler.

    Args:
        which: "fold", "gradient" or "gradient of first".
        program: `Program.text`.
        counts: numbers of data of each kind.
        dtype: dtype of the operands.
        tier: kernel family, from the plan.
        capability: compute capability of the GPU, such as (9, 0).
        owned: for a fold whose threads own rows; widths are multiples of the lanes' 16-byte vectors.
        row_block: of a fold on tensor cores, from `row_block_of`.
    """
    found = compiler.find()
    assert found is not None
    source = (fold_source if which == _FOLD else gradient_source)(program, *counts)
    if owned is not None:
        names = [f"narrow::fold_narrow<{_HERE}P, {', '.join(map(str, owned))}>", f"combine_states<{_HERE}P>"]
        return _compiled_narrow(source, [_state_check(program)], names, dtype, capability)
    text = unit(which, program, source, tier, dtype)
    return compiled_unit(found, text, _instances(which, source, tier, dtype, row_block), tier, capability)


def compiled_row_gradient(
    program: str,
    counts: Counts,
    of_columns: bool,
    operands: bool,
    data: tuple[int, ...],
    dtype: torch.dtype,
    owned: Owned,
    capability: tuple[int, int],
    tier: str,
) -> Image:
    """The kernel that sums the gradient of each row where it stays: in a thread, or with planes in a block.

    Args:
        program, counts, of_columns, operands, data: as in `cuda_source.pulled_source`.
        dtype: dtype of the operands.
        owned: as in `compiled`; with planes only the first width is read.
        capability: compute capability of the GPU, such as (9, 0).
        tier: kernel family, from the plan.
    """
    source = pulled_source(program, *counts, of_columns, operands, data)
    if _C.FAMILIES[tier].planes:
        found = compiler.find()
        assert found is not None
        text = _UNIT.format(
            includes='#include "monoidreduce/device/resident/row_gradient_planes_sm90.cuh"\n',
            program=source.text,
            real="ElementReal",
            checks="",
        )
        width = next(size for size in _WIDTHS if owned[0] <= size)
        names = [f"{_HERE}sm90::row_gradient_planes_kernel<{_HERE}P, {width}>"]
        return compiled_unit(found, text, names, tier, capability)
    names = [f"narrow::pull_narrow<{_HERE}P, {', '.join(map(str, owned))}>"]
    return _compiled_narrow(source, [], names, dtype, capability)


def _compiled_narrow(
    source: Source, checks: list[str], names: list[str], dtype: torch.dtype, capability: tuple[int, int]
) -> Image:
    found = compiler.find()
    assert found is not None
    text = _UNIT.format(
        includes='#include "monoidreduce/device/simt/program_narrow.cuh"\n',
        program=source.text,
        real=_real(dtype),
        checks="".join(checks),
    )
    return compiled_unit(found, text, [f"{_HERE}simt::{name}" for name in names], "simt", capability)


def scores_kernel(
    program: str,
    which: str,
    packed: bool,
    dtype: torch.dtype,
    width: int,
    tier: str,
    scale: float,
    weights: bool,
    most: int,
    tables: TableSum | None,
    device: int,
) -> int:
    """The handle of a forward or backward kernel of attention with modified scores.

    Arguments as in `compiled_scores`. width: the larger width of the operands. scale: factor of dot products.
    """
    family = _C.FAMILIES[tier]
    at_most = next(size for size in _WIDTHS if width <= size) if family.tensor_cores else _ANY_WIDTH
    steps = family.score_mod_variants and scale >= _LEAST_SCALE and not weights
    of, capability = (steps, weights, most, tables), capability_of(device)
    return handle_of(compiled_scores, program, which, packed, dtype, at_most, tier, capability, *of)


def compiled_scores(
    program: str,
    which: str,
    packed: bool,
    dtype: torch.dtype,
    width: int,
    tier: str,
    capability: tuple[int, int],
    steps: bool = False,
    weights: bool = False,
    most: int = FEW,
    tables: TableSum | None = None,
) -> Image:
    """The kernel of a pass of attention with modified scores.

    Args:
        program: `Program.text`.
        which: FORWARD, BACKWARD, or BACKWARD_IN_TURN (deterministic: blocks add to dq in a fixed order, by
            semaphores). In families without separate cases (`modified_cases` of `_C.Capabilities`) one kernel
            does both.
        packed: whether these are packed sequences.
        dtype: dtype of the operands.
        width: 64, 128 or 256; at most 128 for backward in families with cases. Without tensor cores one
            kernel takes all widths.
        tier: kernel family, from the plan.
        capability: compute capability of the GPU, such as (9, 0).
        steps: in families with cases, whether kernels may add steps, divided by the scale, to dot products
            instead of evaluating scores.
        weights: the scores are weights of `attend`.
        most: from `integers.most_numbers`.
        tables: backward, and what the kernel does with the gradient of the table of reals; None: nothing.
    """
    found = compiler.find()
    assert found is not None
    if not _C.FAMILIES[tier].tensor_cores:
        return _compiled_simt_scores(found, program, which, packed, dtype, capability, weights, most, tables)
    if _C.FAMILIES[tier].planes:
        of = (width, tier, capability, weights, most, tables)
        return _compiled_plane_scores(found, program, which, packed, *of)
    text = _UNIT.format(
        includes=f'#include "monoidreduce/device/resident/modified_{tier}.cuh"\n',
        program=scores_source(program, packed, steps, weights, True, most, tables).text,
        real="WeightReal" if weights else "ScoreReal",
        checks="static_assert(sizeof(ModifiedScores<P>) == sizeof(ModifiedScoresData));\n",
    )
    here, family = _HERE, f"{_HERE}{tier}::"
    tile = [str(width)]
    monoid, rows = ("WeightSum", "AttendRows") if weights else ("LogSumExp", "AttentionRows")
    types = [f"{here}{monoid}<{here}Bits>", f"{here}ModifiedScores<{here}P>"]
    if which == FORWARD:
        types.append(f"{here}{rows}")
    if _C.FAMILIES[tier].score_mod_variants:
        tile.append(str(packed or tables is not None).lower())
        if which != FORWARD:
            tile.append(f"{family}RowSums::{'kInTurn' if which == BACKWARD_IN_TURN else 'kAnyOrder'}")
    name = "forward" if which == FORWARD else "backward"
    tile_type = f"{family}Modified{name.capitalize()}Tile<{', '.join(tile)}>"
    kernel = f"{family}fold_{name}_kernel<{', '.join((_ELEMENTS[dtype], tile_type, *types))}>"
    return compiled_unit(found, text, [kernel], tier, capability)


def _compiled_plane_scores(
    found: compiler.Compiler,
    program: str,
    which: str,
    packed: bool,
    width: int,
    tier: str,
    capability: tuple[int, int],
    weights: bool,
    most: int,
    tables: TableSum | None,
) -> Image:
    """`compiled_scores` for float32 operands in planes: the fold of rows, or the gradients of q, k and v.

    Behind these kernels is the one that computes again what is not finite, with functions in float. Products
    are not fused, as without tensor cores.
    """
    here = _HERE
    text = _UNIT.format(
        includes=f'#include "monoidreduce/device/resident/modified_{tier}.cuh"\n',
        program=scores_source(program, packed, False, weights, False, most, tables, by_row=True).text,
        real="ElementReal",
        checks="static_assert(sizeof(PlaneScores<P>) == sizeof(ModifiedScoresData));\n"
        "static_assert(sizeof(ProgramScores<Program<float>>) == sizeof(ProgramScoresData<float>));\n",
    )
    fold, scores = (
        f"{here}{'WeightSum' if weights else 'LogSumExp'}<{here}Full>",
        f"{here}PlaneScores<{here}P>",
    )
    repaired = f"{here}ProgramScores<{here}Program<float>>"
    if which == FORWARD:
        tile = f"{here}planes::ModifiedForwardTile<{width}>"
        rows = f"{here}{'MarkedAttendRows' if weights else 'FullAttentionRows'}"
        names = [f"{here}sm90::fold_forward_planes_kernel<{tile}, {fold}, {scores}, {rows}>"]
        again = f"{here}{'Sum<float>' if weights else 'LogSumExp<double>'}"
        rows = f"{here}{'RepairedAttendRows' if weights else 'RepairedAttentionRows'}"
        names.append(f"{here}repair_forward_kernel<{again}, {rows}, {repaired}>")
        return compiled_unit(found, text, names, tier, capability)
    names = []
    for of in ("kRows", "kColumns", "kPayload"):
        tile = f"{here}planes::ModifiedPassTile<{here}sm90::GradientOf::{of}, {width}>"
        names.append(f"{here}sm90::fold_backward_planes_kernel<{tile}, {fold}, {scores}>")
    rows = f"{here}{'WeightRows' if weights else 'SoftmaxRows'}<float>"
    again = f"{here}{'Sum' if weights else 'LogSumExp'}<float>"
    names.append(f"{here}repair_backward_kernel<{again}, {rows}, {repaired}>")
    return compiled_unit(found, text, names, tier, capability)


def _compiled_simt_scores(
    found: compiler.Compiler,
    program: str,
    which: str,
    packed: bool,
    dtype: torch.dtype,
    capability: tuple[int, int],
    weights: bool,
    most: int,
    tables: TableSum | None,
) -> Image:
    """`compiled_scores` without tensor cores.

    Weights are not rounded to 16 bits, so products are not fused.
    """
    real, here = _real(dtype), _HERE
    text = _UNIT.format(
        includes='#include "monoidreduce/device/simt/modified_simt.cuh"\n',
        program=scores_source(program, packed, weights=weights, fused=False, most=most, tables=tables).text,
        real=real,
        checks=f"static_assert(sizeof(ProgramScores<P>) == sizeof(ProgramScoresData<{real}>));\n",
    )
    monoid, rows = ("Sum", "WeightRows") if weights else ("LogSumExp", "SoftmaxRows")
    types = [f"{here}{monoid}<{real}>", f"{here}{rows}<{real}>", f"{here}ProgramScores<{here}P>"]
    name = "forward" if which == FORWARD else "backward"
    kernel = f"{here}simt::fold_{name}<true, {', '.join(types)}>"
    return compiled_unit(found, text, [kernel], "simt", capability)


def compiled_unit(
    found: compiler.Compiler, text: str, names: list[str], tier: str, capability: tuple[int, int]
) -> Image:
    """The kernels with these names in a compilation unit, from the cache or the compiler."""
    architecture = _C.FAMILIES[tier].architecture or _architecture(found.architectures, capability)
    key = cache.key(text, *names, architecture, str(found.version), hash_of_headers())
    image = cache.load(key)
    if image is None:
        ahead.compile_others()
        include = Path(get_include())
        options = ["--std=c++20", "-default-device", f"--include-path={include / 'monoidreduce' / 'rtc'}"]
        if architecture.startswith("sm_"):
            options.append("--ptxas-options=-v")  # writes registers and spills to the log
        with _progress():
            image = found.compile(text, architecture, [*options, f"--include-path={include}"], names)
        cache.store(key, image)
    return image


def unit(which: str, program: str, source: Source, tier: str, dtype: torch.dtype) -> str:
    """The compilation unit: headers of the library, the program, static checks of the host's assumptions."""
    tensor_cores = _C.FAMILIES[tier].tensor_cores
    headers = [f"contraction/program_{tier}" if tensor_cores else "simt/program_simt"]
    if tensor_cores and which == _FOLD:
        headers.append("contraction/fold_epilogue")
    rounds = _ELEMENTS.get(dtype) is not None  # local gradients, to 16 bits
    of_tensor_cores = "GradientReal" if which != _FOLD and rounds else "ElementReal"
    real = of_tensor_cores if tensor_cores else _real(dtype)
    checks = _state_check(program) if which == _FOLD else ""
    includes = "".join(f'#include "monoidreduce/device/{header}.cuh"\n' for header in headers)
    return _UNIT.format(includes=includes, program=source.text, real=real, checks=checks)


def _real(dtype: torch.dtype) -> str:
    return "double" if dtype == torch.float64 else "float"


def _state_check(program: str) -> str:
    return f"static_assert(sizeof(StatisticsState<P>) == {state_words(program)} * sizeof(P::Real));\n"


def _instances(which: str, source: Source, tier: str, dtype: torch.dtype, row_block: int) -> list[str]:
    """The C++ names of the kernels of a unit."""
    here = _HERE
    if not _C.FAMILIES[tier].tensor_cores:
        simt = ("fold_program", "combine_states") if which == _FOLD else ("pull_program",)
        return [f"{here}simt::{name}<{here}P>" for name in simt]
    family, element = f"{here}{tier}::", _ELEMENTS.get(dtype, "__half")  # float32 is multiplied in planes
    if which == _FOLD:
        tile = f"{family}ProgramFoldTile<{source.scores}, {row_block}>"
        return [
            f"{family}contraction_kernel<{element}, {tile}, {here}ProgramFold<{here}P>>",
            f"{here}combine_partial<{here}StatisticsSum<{here}P>, {tile}, {here}ProgramRows<{here}P>>",
        ]
    outs = 1 if which == _GRADIENT_OF_FIRST else source.scores
    tile = f"{family}ProgramGradientTile<{source.scores}, {outs}>"
    epilogue = f"{here}ProgramGradient<{_ELEMENTS.get(dtype, 'float')}, {here}P, {tile}, {outs}>"
    return [f"{family}contraction_kernel<{element}, {tile}, {epilogue}>"]


def _architecture(known: list[int], capability: tuple[int, int]) -> str:
    """The target: machine code for the nearest GPU of the same major version, which runs on later ones.

    Else PTX.
    """
    major, minor = capability
    fitting = [arch for arch in known if arch // 10 == major and arch % 10 <= minor]
    if fitting:
        return f"sm_{max(fitting)}"
    return f"compute_{max(arch for arch in known if arch < 10 * major)}"


@lru_cache(1)
def hash_of_headers() -> str:
    """A hash of all headers that a unit may include."""
    include = Path(get_include()) / "monoidreduce"
    total = hashlib.sha256()
    for folder, folders, names in os.walk(include):  # takes a third of the time of Path.rglob
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            total.update(path[len(str(include)) :].encode() + b"\0" + Path(path).read_bytes())
    return total.hexdigest()


_progresses = threading.Lock()


@contextmanager
def _progress() -> Iterator[None]:
    """Print a line to stderr if the block takes more than a second; MONOIDREDUCE_PROGRESS=0 disables it.

    Blocks that run at once print one line.
    """
    if os.environ.get("MONOIDREDUCE_PROGRESS") == "0" or not _progresses.acquire(blocking=False):
        yield
        return
    text = "monoidreduce: compiling the kernels of a function, once\n"
    timer = threading.Timer(1.0, sys.stderr.write, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _progresses.release()
