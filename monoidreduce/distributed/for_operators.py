"""What core operators call for a process group or DTensors, through `_yards.ranks()`."""

from monoidreduce.distributed import dtensor
from monoidreduce.distributed.attention import attention_over_ranks
from monoidreduce.distributed.attention_varlen import varlen_over_ranks
from monoidreduce.distributed.fold import map_reduce_over_ranks
from monoidreduce.distributed.group import Sharding, together
from monoidreduce.distributed.operators import Sharded
from monoidreduce.distributed.split import unshard
from monoidreduce.distributed.user_folds import statistics_over_ranks

__all__ = [
    "Sharded",
    "Sharding",
    "attention_over_ranks",
    "dtensor",
    "map_reduce_over_ranks",
    "statistics_over_ranks",
    "together",
    "unshard",
    "varlen_over_ranks",
]
