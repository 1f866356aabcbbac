"""Folds that users write: as functions of an element (`statistics`, `score_mod`) or in C++ (`cpp_monoid`).

A function becomes a program (`program`), which three engines run: torch (`torch`), the CPU engine (`cpu`) and
kernels that NVRTC compiles (`cuda`). `cpp` compiles a monoid's text. `*_op.py` are the passes of the ops.
"""
