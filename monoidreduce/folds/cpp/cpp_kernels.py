"""The GPU kernels of a C++ monoid: compiled once and cached on disk, loaded once per process."""

from __future__ import annotations

import torch

from monoidreduce._ops.engine import _C
from monoidreduce.folds.cpp.cpp_source import as_error, parse, unit
from monoidreduce.folds.cuda import cache, compiler
from monoidreduce.folds.cuda.cache import Image
from monoidreduce.folds.cuda.compiler import CompilationError
from monoidreduce.folds.cuda.kernels import capability_of, compiled_unit, handle_of, hash_of_headers
from monoidreduce.folds.operands import Operands

__all__ = [
    "FOLD",
    "GRADIENT",
    "LAWS",
    "compiled",
    "fold_plan",
    "gradient_plan",
    "key_of_verdict",
    "loaded",
    "no_operands",
]

FOLD, GRADIENT, LAWS = "fold_monoid", "pull_monoid", "try_laws"
_MONOIDS = ("argmax", "cross_entropy", "distillation", "log_probs", "logsumexp", "sum", "weighted_sum")
# All monoids of the library are included, so that an #include inside the user's namespace has no effect.
_HEADERS = ("device/simt/monoid_simt.cuh", *(f"monoids/{name}.h" for name in _MONOIDS))
_INCLUDES = "".join(f'#include "monoidreduce/{header}"\n' for header in _HEADERS)


def loaded(which: str, monoid: str, dtype: torch.dtype, device: int) -> int:
    """The handle of a kernel (see `compiled`), loaded for a GPU. device: its index."""
    return handle_of(compiled, which, monoid, dtype, capability_of(device))


def compiled(which: str, monoid: str, dtype: torch.dtype, capability: tuple[int, int]) -> Image:
    """A kernel, from the cache or the compiler.

    Args:
        which: FOLD, GRADIENT (by the scores) or LAWS, whose numbers are float64.
        monoid: `CppSource.text`.
        dtype: of the operands.
        capability: of the GPU, as (9, 0).

    Raises:
        CppMonoidError: the compiler refuses the user's text.
    """
    found = compiler.find()
    assert found is not None
    real = "double" if which == LAWS or dtype == torch.float64 else "float"
    text = unit(parse(monoid), real, _INCLUDES)
    kernel = f"monoidreduce::simt::{which}<monoidreduce::CppMonoid, monoidreduce::CppFields>"
    try:
        return compiled_unit(found, text, [kernel], "simt", capability)
    except CompilationError as error:
        raise as_error(str(error), parse(monoid)) from None


def fold_plan(operands: Operands) -> _C.Plan:
    """The plan of the fold. Kernels of C++ monoids never use tensor cores, whatever the dtype."""
    return _C.plan_statistics_fold(*operands, state_words=0)


def gradient_plan(operands: Operands) -> _C.Plan:
    """The plan of the local gradients. A workspace of 0 rules out tensor-core kernels, which need one."""
    return _C.plan_statistics_local_gradient(*operands, workspace=0)


def no_operands(rows: int, device: torch.device) -> Operands:
    """Dummy operands for a call that reads none: `rows` rows and one column, float64."""
    a = torch.zeros((rows, 1), dtype=torch.float64, device=device)
    return a, a[:1], None, None


def key_of_verdict(monoid: str) -> str:
    """The cache key of the law check's verdict, which is the same for all GPUs."""
    return cache.key("laws", unit(parse(monoid), "double", _INCLUDES), hash_of_headers())
