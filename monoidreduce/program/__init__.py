"""Programs: what `monoidreduce.statistics` makes of a Python function.

A function of one element is traced to a graph of scalar operations (`tracing`). A `Program` is that graph as
data, with the statistics that fold it. Its gradient is derived (`derivative`), and two readers run it: torch
(`reader`) and the CPU engine's interpreter (`bytecode`). `monoid` has the same statistics as a `Monoid`.
`statistics_laws` compares the two readers, and the gradient with autograd, before a program's first use.

Nothing here is imported before the first function is traced.
"""
