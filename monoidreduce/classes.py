"""Sets of classes as bits: the words that `kept=` of the linear losses takes.

Bit c % 32 of a row's word c // 32 is set if the row keeps class c. This is the layout of the bitmasks of
xgrammar and vLLM.
"""

from __future__ import annotations

import torch
from torch import Tensor

from monoidreduce._torch_private import can_read
from monoidreduce._validate import INTEGERS, check_int, check_tensor, mismatch

__all__ = ["check_words", "has_class", "pack_classes", "words_of_rows"]

_BITS = 32  # of a word


def _number_of_words(classes: int) -> int:
    """The number of words that hold a bit for each class."""
    return -(-classes // _BITS)


def pack_classes(indices: Tensor, classes: int) -> Tensor:
    """The words of the sets of classes that rows of indices name, for `kept=` of `linear_log_probs`.

    Bit c % 32 of word c // 32 is set if class c is among a row's indices: the layout of the bitmasks of
    xgrammar and vLLM. Nothing waits for a GPU, and [..., classes] is not made.

    Args:
        indices: [..., K] classes, of any integer dtype, in any order; -1 where a row has fewer. An index may
            occur more than once.
        classes: V, the number of classes; over ranks that of all ranks.

    Returns:
        [..., ceil(V / 32)] int32.

    Raises:
        TypeError, ValueError: an argument is not as above.
        IndexError: an index is neither -1 nor in [0, V). It is left out instead on CUDA devices, and where
            torch.compile or make_fx traces the call or torch.func transforms it.
    """
    check_tensor("indices", indices)
    if indices.dtype not in INTEGERS:
        raise TypeError(mismatch("indices", "class indices of an integer dtype", indices.dtype))
    if not indices.dim():
        raise ValueError(mismatch("indices", "shape [..., K]", []))
    if (classes := check_int("classes", classes, "an int >= 0")) < 0:
        raise ValueError(mismatch("classes", "an int >= 0", classes))
    leading, words = indices.shape[:-1], _number_of_words(classes)
    sets = indices.reshape(leading.numel(), indices.shape[-1]).long()
    inside = (sets >= 0) & (sets < classes)
    if can_read(indices) and not bool((inside | (sets == -1)).all()):
        wrong = sets[~(inside | (sets == -1))][0].item()
        raise IndexError(mismatch("indices", f"classes in [0, {classes}) or -1", wrong))
    if not words or not sets.numel():
        return sets.new_zeros((*leading, words), dtype=torch.int32)
    ordered = torch.where(inside, sets, -1).sort(-1).values
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]  # each class adds its bit once
    bit = 1 << ordered.clamp(min=0) % _BITS
    bit = torch.where(bit == 1 << _BITS - 1, -bit, bit)  # the highest one is the sign
    of_rows = torch.arange(len(sets), device=sets.device)[:, None] * words
    place = ordered.clamp(min=0) // _BITS + of_rows
    added = torch.where(first & (ordered >= 0), bit, 0).to(torch.int32)
    packed = added.new_zeros(len(sets) * words).scatter_add_(0, place.flatten(), added.flatten())
    return packed.view(*leading, words)


def has_class(kept: Tensor, classes: Tensor) -> Tensor:
    """Whether each row keeps its class: kept [..., words], classes [...] -> bool [...].

    False if the class is none of those that the words have bits for.
    """
    if not kept.shape[-1]:
        return torch.zeros_like(classes, dtype=torch.bool)
    inside = (classes >= 0) & (classes < kept.shape[-1] * _BITS)
    at = torch.where(inside, classes, 0)
    word = kept.gather(-1, (at // _BITS)[..., None])[..., 0]
    return inside & ((word >> at % _BITS) & 1).bool()


def words_of_rows(kept: Tensor, x: Tensor, classes: int | None = None) -> Tensor:
    """The checked argument `kept` [..., words] as [rows, words], for x [..., D].

    classes: how many there are; None if `check_words` checks the number of words later.
    """
    if check_tensor("kept", kept).dtype != torch.int32:
        raise TypeError(mismatch("kept", "a tensor of torch.int32, a bit for each class", kept.dtype))
    shape = list(x.shape[:-1])
    if not kept.dim() or list(kept.shape[:-1]) != shape:
        words = "ceil(V / 32)" if classes is None else _number_of_words(classes)
        expected = (
            f"shape [{', '.join(map(str, [*shape, words]))}], a bit for each of {classes or 'V'} classes"
        )
        raise ValueError(mismatch("kept", expected, list(kept.shape)))
    if kept.device != x.device:
        raise ValueError(mismatch("kept", f"a tensor on {x.device} as x", kept.device))
    words_of = kept.reshape(x.shape[:-1].numel(), kept.shape[-1])
    if classes is not None:
        check_words(words_of, classes, shape)
    return words_of


def check_words(kept: Tensor | None, classes: int, shape: list[int] | None = None) -> None:
    """Raise ValueError if kept [rows, words] has too few or too many words for the number of classes.

    classes: of all ranks together. shape: of the leading axes, for the message.
    """
    words = _number_of_words(classes)
    if kept is not None and kept.shape[1] != words:
        leading = ", ".join(map(str, ["..."] if shape is None else shape))
        leading += ", " if leading else ""
        expected = f"shape [{leading}{words}], a bit for each of {classes} classes"
        raise ValueError(mismatch("kept", expected, f"[{leading}{kept.shape[1]}]"))
