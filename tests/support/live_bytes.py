"""The most memory that tensors take at a time, also inside of the ops of folds."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from monoidreduce.folds import modified_attention_op, statistics_op

_INSIDE = {
    torch.ops.monoidreduce.statistics.default: statistics_op.forward,
    torch.ops.monoidreduce.statistics_backward.default: statistics_op.backward,
    torch.ops.monoidreduce.modified_attention_backward.default: modified_attention_op.backward,
}


class LiveBytes(TorchDispatchMode):
    """Context that notes the most bytes of tensors which operations in it returned and which live.

    torch takes a mode off while it runs an op's implementation; these run under it here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.most, self._live = 0, 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _INSIDE:
            with self:
                return _INSIDE[function](*args)
        result = function(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor):
                self._note(t.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        number, size = storage._cdata, storage.nbytes()
        if number not in self._known:
            self._known.add(number)
            self._live += size
            self.most = max(self.most, self._live)
            weakref.finalize(storage, self._released, number, size)

    def _released(self, number: int, size: int) -> None:
        self._known.discard(number)
        self._live -= size
