"""I/O complexity of attention's backward pass: a simulated two-level memory, algorithms in it, and bounds.

It follows the paper "On Fine-grained I/O Complexity of Attention Backward Passes"; docstrings name the
paper's definitions, theorems, lemmas and algorithms. docs/io.md is the guide.

    >>> from monoidreduce.io import simulate, small_cache
    >>> memory = simulate(small_cache, n=256, d=32, words=1024)
    >>> memory.io, memory.phases
    (1500160, {'f': 499712, 'q': 368640, 'p': 327680, 'g': 304128})
"""

from .algorithms import ALGORITHMS, Algorithm, best_algorithm
from .bounds import (
    Bound,
    compulsory,
    dividing_point,
    large_cache_theta,
    lower_bounds,
    matmul,
    nonzeros,
    regime,
    segment,
    small_cache_theta,
    sparse_theta,
    sparse_theta_informal,
    theta,
    theta_forward,
)
from .comparison import Comparison, compare
from .figure import save_figure
from .flash import flash1_backward, flash2_backward, flash_forward, flash_rows
from .graph import Graph, attention_backward_graph, attention_forward_graph, product_graph
from .large_cache import large_cache
from .masks import causal, kept_blocks, window
from .no_cache import no_cache
from .ours import OurTiles, ours_backward, ours_forward
from .partition import NotAPartition, check_partition, minimum_set, partition_of, smallest_dominator
from .pebbles import IllegalMove, Move, optimum, play
from .problem import attention_problem, reference, simulate
from .products import gemm_naive, gemm_perfect, gemm_tiled
from .small_cache import small_cache
from .trace import REGISTERS, TracedMemory
from .two_level import CacheOverflow, Memory

__all__ = [
    "ALGORITHMS",
    "REGISTERS",
    "Algorithm",
    "Bound",
    "CacheOverflow",
    "Comparison",
    "Graph",
    "IllegalMove",
    "Memory",
    "Move",
    "NotAPartition",
    "OurTiles",
    "TracedMemory",
    "attention_backward_graph",
    "attention_forward_graph",
    "attention_problem",
    "best_algorithm",
    "causal",
    "check_partition",
    "compare",
    "compulsory",
    "dividing_point",
    "flash1_backward",
    "flash2_backward",
    "flash_forward",
    "flash_rows",
    "gemm_naive",
    "gemm_perfect",
    "gemm_tiled",
    "kept_blocks",
    "large_cache",
    "large_cache_theta",
    "lower_bounds",
    "matmul",
    "minimum_set",
    "no_cache",
    "nonzeros",
    "optimum",
    "ours_backward",
    "ours_forward",
    "partition_of",
    "play",
    "product_graph",
    "reference",
    "regime",
    "save_figure",
    "segment",
    "simulate",
    "small_cache",
    "small_cache_theta",
    "smallest_dominator",
    "sparse_theta",
    "sparse_theta_informal",
    "theta",
    "theta_forward",
    "window",
]
