"""Folds over several devices: the fold of a state from each rank, and parts of tensors.

The operators take `process_group` themselves; see `monoidreduce.functional` and docs/distributed.md.
"""

from monoidreduce.distributed.dtensor import MLPParallel, VocabParallel
from monoidreduce.distributed.fold import all_fold
from monoidreduce.distributed.split import shard, unshard

__all__ = ["MLPParallel", "VocabParallel", "all_fold", "shard", "unshard"]
