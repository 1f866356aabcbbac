"""Folds over several ranks: combining one state from each rank, and sharding tensors.

The operators themselves take `ranks`; see `monoidreduce.Ranks` and docs/distributed.md.
"""

from monoidreduce.distributed.dtensor import MLPParallel, VocabParallel
from monoidreduce.distributed.fold import all_fold
from monoidreduce.distributed.split import shard, unshard

__all__ = ["MLPParallel", "VocabParallel", "all_fold", "shard", "unshard"]


def __dir__() -> list[str]:
    """The public names, and the module's dunder names."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
