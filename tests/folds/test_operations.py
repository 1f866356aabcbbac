"""Each operation of programs: the CPU engine's instruction and the derivative, beside torch and autograd."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_statistics import assert_exact, with_gradients
from torch import Tensor

import monoidreduce as mr
from monoidreduce.folds import distillation, number_passes
from monoidreduce.folds.cpu import bytecode
from monoidreduce.folds.number_passes import Wanted
from monoidreduce.folds.operands import ProgramCall
from monoidreduce.folds.program.arguments import ARGUMENTS
from monoidreduce.folds.program.operations import OPERATIONS
from monoidreduce.folds.program.program import Program, parse
from monoidreduce.folds.statistics import Statistics
from monoidreduce.folds.torch.reader import statistics

stat = mr.stat
F32, F64 = torch.float32, torch.float64
ROOT = Path(__file__).parents[2]
# "share" is of derived programs alone, gathers are of attention's, and others of lowered programs.
OF_TRACES = [
    name
    for name, of in OPERATIONS.items()
    if "wide" not in of.kinds
    and name
    not in ("share", "within_from_0", "within", "table_line", "table_place", "gather", "index_gather")
    and not name.startswith("as_")
]


def program_with(name: str) -> str:
    """A program with one operation, of scores and data."""
    numbers = {"real": iter((2, 3, 4)), "index": iter((6, 5, 6)), "bool": iter((7, 8))}
    nodes: list[tuple[Any, ...]] = [
        ("score",),
        ("real", (1.125).hex()),
        ("mul", 0, 1),
        ("row", 0),
        ("column", 0),
        ("row_index", 0, "int32"),
        ("position",),
        ("lt", 2, 3),
        ("index_lt", 5, 6),
        (name, *(next(numbers[kind]) for kind in OPERATIONS[name].kinds[:-1])),
    ]
    nodes += {"real": [], "index": [("to_real", 9)], "bool": [("where", 9, 3, 4)]}[OPERATIONS[name].kinds[-1]]
    nodes.append(("mul", len(nodes) - 1, 2))
    return Program(tuple(nodes), totals=(len(nodes) - 1,)).pruned()[0].text


def both(text: str, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """A program's values and gradients by the scores and data: by the CPU engine, and by torch in float64."""
    program, generator = parse(text), torch.Generator().manual_seed(0)
    rows, columns = 19, 20
    positive = [torch.rand(n, generator=generator).mul(0.8).add(0.1).to(dtype) for n in (rows, columns)]
    score = torch.rand(rows, columns, generator=generator).mul(0.8).add(0.1).to(dtype)
    index = torch.randint(-9, 20, (1, rows), generator=generator)
    leaves = {"row": positive[0][None], "column": positive[1][None], "row_index": index}
    leaves = {name: t for name, t in leaves.items() if any(node[0] == name for node in program.nodes)}
    exact = [t.double().requires_grad_() for t in (score, *positive)]

    def leaf(node: Any) -> Tensor:
        if node[0] == "row_index":
            return index[0][:, None]
        return exact[1][:, None] if node[0] == "row" else exact[2]

    values, *_ = statistics(program, exact[0], leaf)
    upstream = torch.randn(values.shape, generator=generator, dtype=F64).to(dtype)
    expected = torch.autograd.grad(
        (values * upstream).sum(), exact, allow_unused=True, materialize_grads=True
    )
    scores = ((torch.eye(rows, dtype=dtype), score.T.contiguous()),)
    data = (leaves.get("row"), leaves.get("column"), leaves.get("row_index"), None)
    call = ProgramCall(text, scores, data, 1.0)
    found, low, indices = number_passes.fold(call)
    wanted = Wanted((False, True), row=True, column=True)
    (_, by_columns), of_rows, of_columns, _ = number_passes.gradients(
        call, (found, low, indices), upstream, wanted
    )
    assert by_columns is not None
    of_data = [torch.zeros(n) if t is None else t[0] for t, n in ((of_rows, rows), (of_columns, columns))]
    gradients = [by_columns.T, *of_data]
    return [found, *gradients], [values.detach(), *expected]


def differs(name: str, dtype: torch.dtype) -> bool:
    found, expected = both(program_with(name), dtype)
    tolerance = 1e-11 if dtype == F64 else 2e-5
    return not all(
        torch.allclose(
            ours.double(), theirs, rtol=tolerance, atol=tolerance * (1 + float(theirs.abs().max()))
        )
        for ours, theirs in zip(found, expected, strict=True)
    )


@pytest.mark.isa
@pytest.mark.parametrize("dtype", (F32, F64), ids=str)
@pytest.mark.parametrize("name", OF_TRACES)
def test_values_and_derivatives(name: str, dtype: torch.dtype) -> None:
    assert not differs(name, dtype)


def instructions_of(name: str) -> tuple[str, ...]:
    """Those that an operation is lowered to."""
    if name.startswith("uniform"):
        return (f"wide_{name}",)
    return (name, name.replace("index_", "wide_")) if name.startswith("index_") else (name,)


@pytest.mark.parametrize(
    "name", [name for name in OF_TRACES if name not in ("detach", "counted", "index_eq", "eq")]
)
def test_another_instruction_would_be_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That is, the numbers tell it from others that take the same."""
    kinds, alike = OPERATIONS[name].kinds, {"detach", "counted", "index_stream", name}
    alike |= {"lt", "le"} if name in ("lt", "le") else set()
    for other in (of for of in OF_TRACES if OPERATIONS[of].kinds == kinds and of not in alike):
        for code in (bytecode.forward_code, bytecode.backward_code):
            code.cache_clear()
        with monkeypatch.context() as patch:
            for of, by in zip(instructions_of(name), instructions_of(other), strict=True):
                patch.setitem(bytecode.INSTRUCTIONS, of, bytecode.INSTRUCTIONS[by])
            assert differs(name, F64), other
    for code in (bytecode.forward_code, bytecode.backward_code):
        code.cache_clear()


# Functions of a score with a narrow domain, kinks, ties and infinities.
KINKS: tuple[Callable[[Any], Any], ...] = (
    lambda x: stat.total(torch.log(x + 4)),
    lambda x: stat.total(1 / (x + 0.3)),
    lambda x: stat.total(torch.exp(torch.exp(x))),
    lambda x: stat.total(torch.where(x > 0, torch.log(torch.where(x > 0, x, 1.0)), 0.0)),
    lambda x: stat.total(x.detach() * x),
    lambda x: stat.total(torch.sign(x) * torch.abs(torch.clamp(x, -1, 1))),
    lambda x: stat.largest(F.relu(x)),
    lambda x: stat.smallest(F.relu(x)),
    lambda x: stat.largest(torch.where(x > 0, x, -math.inf)),
    lambda x: stat.softmax(torch.where(x > 0, x, -math.inf)).mean(torch.log(torch.abs(x))),
    lambda x: stat.softmax(torch.where(x > 1e9, x, -math.inf)).logsumexp,
    lambda x: stat.softmax(1000 * x).mean(x),
    lambda x: stat.count(x > 1),
    lambda x: stat.total(0.5),
)


@pytest.mark.parametrize("number", range(len(KINKS)))
def test_domains_and_kinks(number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    a, b = (torch.randn(n, 4, generator=generator, dtype=F64).requires_grad_() for n in (7, 21))
    fold = mr.statistics(lambda score: dict(x=KINKS[number](score)))
    call = {"a": a, "b": b}
    assert_exact(with_gradients(fold, call), with_gradients(fold.reference, call), 1e-9)


MODULES = (
    "noisy_or",
    "divergences",
    "kernel_density",
    "policy_gradient",
    "nearest_neighbours",
    "contrastive",
)
MODULES += ("token_losses", "kernel_sums", "bench.folds", "bench.kernel_sums", "monoidreduce.demo.policy")


@pytest.mark.parametrize("module", (*MODULES, "monoidreduce.folds.distillation"))
def test_functions_of_the_repository(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of examples, benchmarks and the library itself: values and gradients by operands and data."""
    for path in (ROOT, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(path))
    functions = [of for of in vars(importlib.import_module(module)).values() if isinstance(of, Statistics)]
    if module == "monoidreduce.folds.distillation":
        functions = [*distillation._LSE.values(), *distillation._FOLDS.values()]
    assert functions
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).mul(0.5).requires_grad_()

    for of in functions:
        call: dict[str, Any] = {"a": leaf(11, 3), "b": leaf(21, 3)}
        if "other" in of._names:
            call |= {"other_a": leaf(11, 2), "other_b": leaf(21, 2)}
        if "label" in of._names:
            call["label"] = torch.randint(21, (11,), generator=generator)
        call["row"] = {name: leaf(11) for name in of._names if name not in ARGUMENTS}
        assert_exact(with_gradients(of, call), with_gradients(of.reference, call), 1e-9)
