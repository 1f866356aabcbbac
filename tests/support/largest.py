"""The size of the largest tensor that an operation of torch returns."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Context that notes the number of elements of the largest tensor that any operation in it returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for t in result if isinstance(result, (tuple, list)) else (result,):
            self.elements = max(self.elements, t.numel() if isinstance(t, Tensor) else 0)
        return result
