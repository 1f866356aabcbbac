"""Memory-efficient layers as folds over commutative monoids.

Attention, linear cross entropy, distillation and MLP layers are one reduction each,
P_i = f(A_i, B_1) * f(A_i, B_2) * ..., in a commutative monoid. The monoid's gradient needs only the result
and the inputs. So what would be their largest intermediate is never stored, forward or backward.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

# The first three come before all else: one is for Ctrl-C meanwhile, the others refuse what cannot work.
from monoidreduce import _interrupt, _requirements, _unbuilt, _yards, monoids, nn, stat  # noqa: F401
from monoidreduce._paths import get_cmake_dir, get_include
from monoidreduce._version import __version__
from monoidreduce.classes import pack_classes
from monoidreduce.flops import register_when_counted
from monoidreduce.folds import ops as _ops_of_folds  # noqa: F401  # registers them
from monoidreduce.folds.program.errors import CppMonoidError, TraceError
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
from monoidreduce.map_reduce import fold, map_reduce
from monoidreduce.monoids import Monoid
from monoidreduce.precision import float32, get_float32, set_float32
from monoidreduce.ranks import Ranks
from monoidreduce.varlen import attention_varlen
from monoidreduce.workspace import get_workspace, set_workspace, workspace

if TYPE_CHECKING:
    from monoidreduce import distributed
    from monoidreduce.folds.attend import attend
    from monoidreduce.folds.block_mask import block_mask
    from monoidreduce.folds.cpp_monoid import cpp_monoid
    from monoidreduce.folds.decoding import Sample, TopK, linear_sample, linear_topk
    from monoidreduce.folds.statistics import statistics
    from monoidreduce.inspection import backend_info, explain
    from monoidreduce.laws import MonoidLawError, check_monoid
    from monoidreduce.theory.costs.cost import Cost, cost

__all__ = [
    "Cost",
    "CppMonoidError",
    "LogProbs",
    "Monoid",
    "MonoidLawError",
    "Ranks",
    "Sample",
    "TopK",
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
    "float32",
    "fold",
    "get_cmake_dir",
    "get_float32",
    "get_include",
    "get_workspace",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_log_probs",
    "linear_sample",
    "linear_topk",
    "logsumexp_matmul",
    "map_reduce",
    "merge_attention",
    "mlp",
    "monoids",
    "nn",
    "pack_classes",
    "set_float32",
    "set_workspace",
    "stat",
    "statistics",
    "workspace",
]


# Public names whose modules are imported with their first use, since most programs use few of them.
_LATER = {
    "Cost": "theory.costs.cost",
    "MonoidLawError": "laws",
    "Sample": "folds.decoding",
    "TopK": "folds.decoding",
    "attend": "folds.attend",
    "backend_info": "inspection",
    "block_mask": "folds.block_mask",
    "check_monoid": "laws",
    "cost": "theory.costs.cost",
    "cpp_monoid": "folds.cpp_monoid",
    "explain": "inspection",
    "linear_sample": "folds.decoding",
    "linear_topk": "folds.decoding",
    "statistics": "folds.statistics",
}
_MODULES_LATER = ("distributed", "hardware", "io", "plan")


def __dir__() -> list[str]:
    """The public names, and a module's own."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


def __getattr__(name: str) -> Any:
    if name in _MODULES_LATER:
        return import_module(f"monoidreduce.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"monoidreduce.{_LATER[name]}"), name)
    return value


def _folds() -> Any:
    # With the first call that needs it: folds load more modules than all operators.
    from monoidreduce.folds import for_operators

    return for_operators


def _ranks() -> Any:
    # With the first call that needs it: it imports torch's DTensors, which take long and not every torch has.
    from monoidreduce.distributed import for_operators

    return for_operators


_yards.folds, _yards.ranks = _folds, _ranks
register_when_counted()
