"""Programs: what `monoidreduce.statistics` makes of a Python function.

A function of one element is traced to a graph of scalar operations (`tracing`). A `Program` is that graph as
data, with the statistics that fold it. Its gradient is derived (`derivative`). Three readers run it: torch
(`reader`), the CPU engine's interpreter (`bytecode`), and kernels that NVRTC compiles (`cuda_source`). The
last two take it as `integers` lowers it. `monoid` has the same statistics as a `Monoid`.

Nothing here is imported before the first function is traced.
"""
