"""The checked arguments of a call of `statistics`: the inputs of its op, and its results by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from monoidreduce._ops.memory import accumulation_dtype
from monoidreduce._results import RESULTS
from monoidreduce._validate import (
    INTEGERS,
    check_axes,
    check_factor,
    check_like,
    check_tensor,
    mismatch,
    remembering,
)
from monoidreduce.folds.block_mask import BlockMask, as_block_mask, check_block_mask
from monoidreduce.folds.program.arguments import ARGUMENTS, VECTOR, kind_of
from monoidreduce.folds.program.captures import described
from monoidreduce.folds.program.mods import learned, tables
from monoidreduce.folds.program.program import without_own_row
from monoidreduce.folds.program.tracing import Masking, Source, Traced
from monoidreduce.folds.stat import Extremum
from monoidreduce.folds.torch.reader import evaluate
from monoidreduce.functional import _like_rows, _operands, _per_row, _rows, check_index

if TYPE_CHECKING:
    from monoidreduce.folds.statistics import Statistics

__all__ = ["Call", "Options", "checked_label", "checked_operands"]

# Options of the op: the program, the widths of its payload sums, the number of batches of columns, and the
# sizes of what it gathers from.
Options = tuple[str, list[int], int, list[int]]


@remembering
def _of_fold(
    a: Tensor, b: Tensor, other_a: Tensor | None, other_b: Tensor | None
) -> tuple[list[Any], dict[Any, Any]]:
    shape = check_tensor("a", a).shape
    operands = _operands(("other_a", "other_b"), a=a, b=b, other_a=other_a, other_b=other_b)
    a, b, other_a, other_b = operands
    b, other_b = _flat_columns(a, b, other_b)
    sizes: dict[Any, Any] = {}
    check_axes("a", _rows("a", a, "D"), ("rows", "D"), sizes, a)
    check_axes("b", b, ("V", "D"), sizes)
    if other_a is not None and other_b is not None:
        if other_a.shape[:-1] != shape[:-1]:
            expected = f"the leading axes of a, as a is {list(shape)}"
            raise ValueError(mismatch("other_a", expected, list(other_a.shape)))
        check_axes("other_a", _rows("other_a", other_a, "E"), ("rows", "E"), sizes, other_a)
        check_axes("other_b", other_b, ("V", "E"), sizes)
    return operands, sizes


def checked_operands(a: Tensor, b: Tensor, other_a: Tensor | None, other_b: Tensor | None) -> tuple[Any, ...]:
    """Check the rows and columns of a fold's scores, and flatten them to matrices.

    a [..., D] becomes [rows, D]. b is [V, D], or [..., V, D] with the leading axes of a, which becomes [all
    columns, D]. other_a and other_b are the same for a second score.
    """
    (a, b, other_a, other_b), _ = _of_fold(a, b, other_a, other_b)
    b, other_b = _flat_columns(a, b, other_b)
    return _rows("a", a, "D"), b, None if other_a is None else _rows("other_a", other_a, "E"), other_b


def _flat_columns(a: Tensor, b: Tensor, other_b: Tensor | None) -> list[Any]:
    """b and other_b: [V, D] as they are; [..., V, D], with the leading axes of a, as [all columns, D]."""
    if b.dim() <= 2:
        return [b, other_b]
    leading = list(a.shape[:-2])
    for name, columns in (("b", b), ("other_b", other_b)):
        if columns is not None and (columns.dim() != a.dim() or list(columns.shape[:-2]) != leading):
            expected = f"shape [V, D], or {[*leading, 'V', 'D']} as a is {list(a.shape)}".replace("'", "")
            raise ValueError(mismatch(name, expected, list(columns.shape)))
    return [None if columns is None else columns.flatten(0, -2) for columns in (b, other_b)]


def checked_label(label: Tensor, a: Tensor) -> Tensor:
    """Check a label with the leading axes of a: [...] integers -> [rows] int64."""
    check_tensor("label", label)
    _check_integers("label", label)
    return torch.Tensor.long(_per_row("label", label, a, "a"))


def _is_payload(datum: Tensor) -> bool:
    """Whether a datum of columns has a vector for each column: a payload, or for `stat.distance`."""
    return datum.dim() == 2 and datum.dtype.is_floating_point


def _check_integers(name: str, tensor: Tensor) -> None:
    if tensor.dtype not in INTEGERS or tensor.dtype == torch.uint64:
        instead = "an integer dtype that int64 holds"
        instead += "; write t.to(torch.int64)" if tensor.dtype == torch.uint64 else ""
        raise TypeError(mismatch(name, instead, tensor.dtype))


class Call:
    """The checked arguments of a call."""

    def __init__(
        self,
        of: Statistics,
        a: Tensor,
        b: Tensor,
        other_a: Tensor | None,
        other_b: Tensor | None,
        label: Tensor | None,
        ignore_index: int,
        row: Mapping[str, Tensor],
        column: Mapping[str, Tensor],
        scale: float,
        first_column: int = 0,
        block_mask: BlockMask | None = None,
        words: Tensor | None = None,
    ) -> None:
        self.of, names = of, of._names
        self.given, self.first_column, self.words = a, first_column, words
        if ("other" in names) != (other_a is not None) or (other_a is None) != (other_b is None):
            expected = (
                "two tensors, for the argument other" if "other" in names else "none: no argument is other"
            )
            given = " and ".join("none" if t is None else "a tensor" for t in (other_a, other_b))
            raise ValueError(mismatch("other_a, other_b", expected, given))
        self.operands: tuple[Any, ...] = checked_operands(a, b, other_a, other_b)
        self.batches, self.columns = math.prod(b.shape[:-2]), b.shape[-2]
        self.scale = check_factor("scale", scale)
        self.ignore_index = check_index("ignore_index", ignore_index)
        self.label = self._label(label, "label" in names)
        self.a, self.b = self.operands[:2]
        self.row = {name: self._datum("row", name, t, a.shape[:-1]) for name, t in row.items()}
        self.column = {name: self._datum("column", name, t, b.shape[:-1]) for name, t in column.items()}
        for which, data in (("row", self.row), ("column", self.column)):
            for name in data:
                if name in ARGUMENTS or name not in names or (which == "column" and name in self.row):
                    listed = ", ".join(name for name in names if name not in ARGUMENTS) or "there are none"
                    raise ValueError(mismatch(which, f"names of arguments ({listed}), once", repr(name)))
        if a.dim() != 4 and ("head" in names or "batch" in names):
            expected = "shape [batch, heads, rows, D], for the arguments head and batch"
            raise ValueError(mismatch("a", expected, list(a.shape)))
        self.blocks = None if block_mask is None else as_block_mask(block_mask)
        if self.blocks is not None:
            leading = a.shape[:-2] if a.dim() == 4 else (1, 1)
            check_block_mask(
                self.blocks, leading, (a.shape[-2] if a.dim() > 1 else 1, self.columns), "a and b", self.a
            )

    def _label(self, label: Tensor | None, wanted: bool) -> Tensor | None:
        """[rows] int64; None without a label."""
        if (label is not None) != wanted:
            expected = "a tensor, for the argument label" if wanted else "none: no argument is label"
            raise ValueError(mismatch("label", expected, "none" if label is None else "a tensor"))
        return None if label is None else checked_label(label, self.given)

    def _datum(self, which: str, name: str, tensor: Tensor, shape: Any) -> Tensor:
        named = f"{which}[{name!r}]"
        check_tensor(named, tensor)
        if tensor.dtype.is_floating_point:
            check_like(named, tensor, "a", self.a, (tensor.dtype,))
        elif tensor.dtype != torch.bool:
            _check_integers(named, tensor)
        if tensor.dtype.is_floating_point and tensor.dim() and tensor.shape[:-1] == shape:
            if self.scale == 0 and which == "column":
                raise ValueError(
                    mismatch("scale", f"a factor other than 0 beside the payload {named}", self.scale)
                )
            return tensor.reshape(math.prod(shape), tensor.shape[-1])
        if tensor.shape != shape:
            width = "E" if which == "column" else "D"
            vectors = f"[{', '.join(map(str, (*shape, width)))}]"
            expected = f"shape {list(shape)}, or {vectors} of floating-point numbers"
            raise ValueError(mismatch(named, expected, list(tensor.shape)))
        return tensor if len(shape) == 1 else tensor.reshape(-1)

    @property
    def masking(self) -> Masking | None:
        """The block mask's function; the sizes of its blocks, if their kinds decide; and whether rows have
        batches and heads."""
        if self.blocks is None:
            return None
        return self.blocks.mask_mod, self.blocks.block if self.blocks.listed else None, self.given.dim() == 4

    @property
    def tensors(self) -> tuple[Any, Any]:
        """The tensors that `tracing.STAND_INS` stand for; None if the call has none."""
        return None if self.blocks is None else self.blocks.kinds, self.words

    @property
    def kinds(self) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...], int]:
        """The names and kinds of the data of rows and of columns, and ignore_index."""
        rows = tuple(
            [(name, kind_of(t) if t.dim() == 1 else f"{VECTOR}{t.shape[1]}") for name, t in self.row.items()]
        )
        columns = [(name, "payload" if _is_payload(t) else kind_of(t)) for name, t in self.column.items()]
        return rows, tuple(columns), self.ignore_index

    @property
    def positions(self) -> Tensor:
        """[V] the indices of the columns."""
        positions = torch.arange(self.columns, device=self.a.device) + self.first_column
        return positions if self.batches == 1 else positions.repeat(self.batches)

    def operands_of(self, traced: Traced) -> tuple[Any, ...]:
        """The operands that the program uses; those of a second score only if it reads `other`."""
        return self.operands if traced.scores == 2 else (self.a, self.b, None, None)

    def payload_of(self, traced: Traced) -> tuple[Tensor | None, list[int]]:
        """The vectors of all payload sums side by side, [V, sum of widths]; and the width of the vectors of
        each entry of the program's `payloads`.

        They are in the dtype of a if all are; otherwise in the accumulation dtype.
        """
        if not traced.payloads:
            return None, []
        vectors = [self.column[name] for _, name in traced.payloads]
        widths = [0] * len(traced.program.payloads)
        for (number, _), t in zip(traced.payloads, vectors, strict=True):
            widths[number] += t.shape[1]
        own = self.a.dtype
        dtype = own if all(t.dtype == own for t in vectors) else accumulation_dtype(own)
        vectors = [t.to(dtype) for t in vectors]
        return torch.cat(vectors, 1) if len(vectors) > 1 else vectors[0], widths

    def inputs(
        self, traced: Traced, tensors: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor | None, ...], Options]:
        """The inputs of the op, and its first options."""
        payload, widths = self.payload_of(traced)
        row, column, row_index, column_index = self.data_of(traced, tensors)
        text, table, table_index, sizes = self.tables_of(traced, tensors)
        if traced.program.own_row is not None and self.given.shape[-2] * self.batches != len(self.a):
            text = without_own_row(text)  # rows of several heads share columns
        data = (row, column, payload, table, row_index, column_index, table_index)
        return (*self.operands_of(traced), *data), (text, widths, self.batches, sizes)

    def attention_inputs(self, traced: Traced) -> list[Tensor]:
        """Queries, keys and values, [batches, 1 head, rows or columns, width].

        With a block mask they have the batches and heads of a, which may share keys.
        """
        payload, _ = self.payload_of(traced)
        assert payload is not None
        leading = (self.batches, 1)
        if self.blocks is not None:
            given = self.given.shape[:-2]
            leading = (given[0], given[1]) if len(given) == 2 else (math.prod(given), 1)

        def by_heads(t: Tensor) -> Tensor:
            return t.view(*leading, len(t) // max(math.prod(leading), 1), t.shape[1])

        of_columns = [
            t.expand(leading[0], 1, *t.shape) if self.batches == 1 else by_heads(t) for t in (self.b, payload)
        ]
        return [by_heads(self.a), *of_columns]

    def is_attention(self, traced: Traced) -> bool:
        """Whether the kernels of attention compute the call: they fold scores and vectors in one pass.

        On a GPU without tensor cores those of folds are faster for narrow operands (H100, float32: 3.4 beside
        11.9 ms for D and E of 3, 32768 rows and columns; 7.3 beside 4.1 ms for D and E of 64, 16384).
        """
        if not traced.is_attention or self.batches == 0:
            return False
        payload, _ = self.payload_of(traced)
        assert payload is not None
        if payload.dtype != self.a.dtype:
            return False
        narrow = max(self.a.shape[1], payload.shape[1]) <= 32
        if self.blocks is not None:  # of which they skip those that keep nothing
            return True
        return self.a.is_cpu or self.a.dtype.itemsize == 2 or not narrow

    def check_captured(self, traced: Traced, tensors: tuple[Tensor, ...], columns: int) -> None:
        """Raise ValueError unless captured tensors are on a's device and large enough for all rows and
        columns.

        Checked here because a GPU's own error would not name the tensor. columns: number of columns.
        """
        for kind in ("row", "column", "row_index", "column_index"):
            for name, *rest in traced.sources[kind]:
                if name == "tensor":
                    self._check_captured(traced, tensors[rest[0]], rest[1], columns)
        for number, indices in traced.by_both:
            self._check_captured(traced, tensors[number], indices, columns)

    def data_of(self, traced: Traced, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """Real data of rows [data, rows] and of columns [data, V], then integer data of both.

        None if empty.
        """
        if tensors and not torch.compiler.is_compiling():  # the compiler has its own errors
            self.check_captured(traced, tensors, self.first_column + self.columns)
        return tuple(
            [
                self._stacked(traced, tensors, kind) if traced.sources[kind] else None
                for kind in ("row", "column", "row_index", "column_index")
            ]
        )

    def _stacked(self, traced: Traced, tensors: tuple[Tensor, ...], kind: str) -> Tensor:
        """The data of one kind, [data, rows or columns]."""
        dtype = torch.int64 if kind.endswith("index") else accumulation_dtype(self.a.dtype)
        vectors: list[Tensor] = []
        for source in traced.sources[kind]:
            t = self._vector(traced, tensors, kind, source)
            t = t if t.dtype == dtype else t.to(dtype)
            of = self.a if kind.startswith("row") else self.b
            vectors.append(t if t.dim() else t.expand(of.shape[0]))
        return torch.stack(vectors) if len(vectors) > 1 else vectors[0].unsqueeze(0)

    def tables_of(
        self, traced: Traced, tensors: tuple[Tensor, ...]
    ) -> tuple[str, Tensor | None, Tensor | None, list[int]]:
        """The program; and what it gathers by row and column together: reals, integers, and their sizes."""
        if not traced.in_tables:
            return traced.text, None, None, []
        of_tables = [tensors[number] for number in traced.in_tables]
        first_sizes = [*accumulate((1 + t.dim() for t in of_tables), initial=0)]
        text = learned(traced.text, first_sizes[:-1], of_tables)
        return (text, *tables(of_tables, self.a, (self.of._function,), scores=len(self.a) * len(self.b)))

    def _vector(self, traced: Traced, tensors: tuple[Tensor, ...], kind: str, source: Source) -> Tensor:
        name, *rest = source
        if name in ("argument", "coordinate"):
            data: dict[str, Tensor] = self.row if kind.startswith("row") else self.column
            if name == "coordinate":
                vectors, (_, k, width) = data[rest[0]], rest
                if vectors.shape[1] != width:
                    expected = f"{width} coordinates, as the other vector of the distance"
                    raise ValueError(mismatch(f"column[{rest[0]!r}]", expected, vectors.shape[1]))
                return vectors[:, k]
            return data[rest[0]]
        if name == "label":
            assert self.label is not None
            return self.label
        if name == "number":
            return torch.full((), rest[0], dtype=torch.int64, device=self.a.device)
        if name in ("leading", "row", "head", "batch"):
            *leading, _ = self.given.shape
            in_batches = len(leading) > 1 and leading[-1] > 0
            if name == "leading" and not in_batches:
                return torch.zeros((), dtype=torch.int64, device=self.a.device)
            number = torch.arange(self.a.shape[0], device=self.a.device)
            if name == "leading":
                return number // leading[-1]
            if name == "row":
                return number % leading[-1] if in_batches else number
            _, heads, rows = leading
            number = number // max(rows, 1)
            return number % max(heads, 1) if name == "head" else number // max(heads, 1)
        number_of_tensor, indices = rest
        tensor = tensors[number_of_tensor]
        if self.a.is_meta:  # only shapes are wanted
            tensor = tensor.to(self.a.device)

        def leaf(node: tuple[Any, ...]) -> Tensor:
            if node[0] == "position":
                return self.positions
            source = traced.gathered[node[0]][node[1]]
            if source == ("label",):
                assert self.label is not None
                ignored = self.label == self.ignore_index
                return self.label.masked_fill(ignored, 0)  # -100 may be outside of the tensor
            return self._vector(traced, tensors, node[0], source)

        found = evaluate(traced.nodes, indices, leaf, self.a)
        if indices and tensor.dtype in (torch.uint16, torch.uint32):
            tensor = tensor.long()  # torch cannot index these dtypes on a GPU
        try:
            gathered: Tensor = tensor[tuple(found[i] for i in indices)] if indices else tensor
        except IndexError as error:  # an index from data, such as a label; a GPU has its own assertion
            raise IndexError(f"{described(tensor, self.of._function)}: {error}") from None
        return gathered

    def _check_captured(self, traced: Traced, tensor: Tensor, indices: tuple[int, ...], columns: int) -> None:
        lengths: dict[Any, int] = {("position",): columns}
        of_rows = traced.gathered["row_index"]
        for name, length in zip(("row", "head", "batch"), (*self.given.shape[-2::-1], 1, 1, 1), strict=False):
            if (name,) in of_rows:
                lengths["row_index", of_rows.index((name,)), "number"] = length
        expected: str | None = None
        given: Any = tensor.device
        if tensor.device != self.a.device and not self.a.is_meta:
            expected = f"one on {self.a.device} as a"
        for number, size in zip(indices, tensor.shape, strict=True):
            if size < lengths.get(traced.nodes[number], 0):
                expected, given = f"{lengths[traced.nodes[number]]} along an axis", f"{size}"
        if expected is not None:
            raise ValueError(mismatch(described(tensor, self.of._function), expected, given))

    def named(self, traced: Traced, values: Tensor, indices: Tensor, sums: Tensor) -> Any:
        """The NamedTuple of results."""

        def of_rows(result: Tensor) -> Tensor:
            return _like_rows(result, self.given)

        vectors: list[Tensor] = []
        if traced.payloads:  # torch.export cannot load a split into no parts
            payloads = [self.column[name] for _, name in traced.payloads]
            parts = torch.split(sums, [t.shape[1] for t in payloads], 1)
            own = self.a.dtype
            vectors = [
                part.to(own) if t.dtype == own else part for part, t in zip(parts, payloads, strict=True)
            ]
        results: list[Any] = []
        value_of = values.unbind(0)
        for kind, *at in traced.outputs:
            if kind == "payload":
                of_sum = vectors[at[0]]
                leading = self.given.shape[:-1]
                results.append(of_sum if len(leading) == 1 else of_sum.reshape(*leading, of_sum.shape[1]))
            elif kind in ("logsumexp", "value"):
                results.append(of_rows(value_of[at[0]]))
            elif kind == "index":
                results.append(of_rows(indices.select(0, at[0])))
            else:
                first, place, k = at
                if k is None:
                    value, index = of_rows(value_of[first]), of_rows(indices.select(0, place))
                else:
                    value, index = (
                        of_rows(t.narrow(0, n, k).mT.contiguous())
                        for t, n in ((values, first), (indices, place))
                    )
                if self.blocks is not None:  # of no column that is kept
                    index = index.masked_fill(value == -math.inf, -1)
                results.append(Extremum(-value if kind == "smallest" else value, index))
        return getattr(RESULTS, traced.result)(*results)
