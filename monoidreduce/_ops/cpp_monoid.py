"""Folds of monoids that users write in C++: one op for all of them, which carries the monoid as text."""

from __future__ import annotations

from monoidreduce._ops.registry import UNROUNDED, register
from monoidreduce._ops.statistics import in_module

_in_passes = in_module("monoidreduce.folds.cpp_monoid_op")

register(
    "cpp_monoid",
    inputs="Tensor a, Tensor b, Tensor? other_a, Tensor? other_b, Tensor? label",
    options="str monoid, float scale, int? workspace",
    outputs="values, kept, indices",
    differentiable="values",
    residuals="values, kept, indices",
    constants="label",
    forward=_in_passes("forward"),
    fake=_in_passes("results"),
    backward=_in_passes("backward"),
    backward_options=UNROUNDED,
)
