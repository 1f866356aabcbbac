"""The parts of folds that core operators use, through `_yards.folds()`."""

from monoidreduce.folds import wide_attention
from monoidreduce.folds.as_statistics import (
    attention_tangents,
    by_statistics,
    obstacle,
    second_derivative,
    varlen_tangents,
)
from monoidreduce.folds.attend import modified_attention
from monoidreduce.folds.cuda.kernels import is_available
from monoidreduce.folds.distillation import Distillation

__all__ = [
    "Distillation",
    "attention_tangents",
    "by_statistics",
    "is_available",
    "modified_attention",
    "obstacle",
    "second_derivative",
    "varlen_tangents",
    "wide_attention",
]
