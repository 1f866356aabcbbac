"""The cost of calls, predicted without running them: `monoidreduce.cost` and its commands."""

from monoidreduce.theory.costs.cost import Cost, Pass, cost

__all__ = ["Cost", "Pass", "cost"]
