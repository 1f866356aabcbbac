"""Memory-efficient layers as folds over commutative monoids.

Attention, linear cross entropy, distillation and MLP layers are one reduction each,
P_i = f(A_i, B_1) * f(A_i, B_2) * ..., in a commutative monoid. The monoid's gradient needs only the result
and the inputs. So what would be their largest intermediate is never stored, forward or backward.
"""

from typing import TYPE_CHECKING, Any

# The first three come before all else: one is for Ctrl-C meanwhile, the others refuse what cannot work.
from monoidreduce import _interrupt, _requirements, _unbuilt, monoids, nn, stat  # noqa: F401
from monoidreduce._paths import get_cmake_dir, get_include
from monoidreduce._version import __version__
from monoidreduce.explanation import backend_info, explain
from monoidreduce.folds.attend import attend
from monoidreduce.folds.block_mask import block_mask
from monoidreduce.folds.cpp_monoid import cpp_monoid
from monoidreduce.folds.program.errors import CppMonoidError, TraceError
from monoidreduce.folds.statistics import statistics
from monoidreduce.functional import (
    LogProbs,
    attention,
    linear_cross_entropy,
    linear_distillation,
    linear_log_probs,
    logsumexp_matmul,
    merge_attention,
    mlp,
)
from monoidreduce.laws import MonoidLawError, check_monoid
from monoidreduce.map_reduce import fold, map_reduce
from monoidreduce.monoids import Monoid
from monoidreduce.theory.costs import Cost, cost
from monoidreduce.varlen import attention_varlen
from monoidreduce.workspace import get_workspace, set_workspace, workspace

if TYPE_CHECKING:
    from monoidreduce import distributed

__all__ = [
    "Cost",
    "CppMonoidError",
    "LogProbs",
    "Monoid",
    "MonoidLawError",
    "TraceError",
    "__version__",
    "attend",
    "attention",
    "attention_varlen",
    "backend_info",
    "block_mask",
    "check_monoid",
    "cost",
    "cpp_monoid",
    "distributed",
    "explain",
    "fold",
    "get_cmake_dir",
    "get_include",
    "get_workspace",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "logsumexp_matmul",
    "map_reduce",
    "merge_attention",
    "mlp",
    "monoids",
    "nn",
    "set_workspace",
    "stat",
    "statistics",
    "workspace",
]


def __dir__() -> list[str]:
    """The public names, and a module's own."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    """`distributed`, which not every torch has what it needs for, with its first use."""
    if name == "distributed":
        from importlib import import_module

        return import_module("monoidreduce.distributed")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
