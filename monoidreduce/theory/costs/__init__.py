"""What calls cost, without running them: `monoidreduce.cost`, and the commands beside it."""

from monoidreduce.theory.costs.cost import Cost, Pass, cost

__all__ = ["Cost", "Pass", "cost"]
