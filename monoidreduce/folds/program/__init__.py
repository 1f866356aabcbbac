"""Programs: the form into which a user's Python function of one element is traced.

Tracing (`tracing`) gives a graph of scalar operations. A `Program` is this graph as data, with the statistics
that fold it. Its gradient is derived symbolically (`derivative`). Three engines run it: torch
(`folds.torch.reader`), the CPU engine's interpreter (`folds.cpu.bytecode`), and kernels that NVRTC compiles
(`folds.cuda.cuda_source`). The last two take the program as lowered by `integers`. `folds.torch.monoid` has
the same statistics as a `Monoid`.
"""
