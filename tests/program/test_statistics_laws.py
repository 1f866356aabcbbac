"""The check of a program before its first use: what it refuses, what it must not, and what it remembers."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folds import FOLDS, random_folds
from hypothesis import HealthCheck, given, settings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import monoidreduce as mr
from monoidreduce import distillation
from monoidreduce.program import bytecode, passes, statistics_laws
from monoidreduce.program.arguments import ARGUMENTS
from monoidreduce.program.errors import TraceError
from monoidreduce.program.operations import OPERATIONS, SAME, Selected
from monoidreduce.program.program import Program
from monoidreduce.program.statistics_laws import Broken, tried
from monoidreduce.program.tracing import trace
from monoidreduce.statistics import Statistics

stat = mr.stat
A, B = torch.arange(12.0).view(3, 4).sin(), torch.arange(20.0).view(5, 4).cos()
ROOT = Path(__file__).parents[2]


def forget() -> None:
    """As another process begins."""
    statistics_laws._check_once.cache_clear()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    forget()


@pytest.fixture
def tries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that are tried."""
    texts: list[str] = []

    def noted(text: str) -> Any:
        texts.append(text)
        return tried(text)

    monkeypatch.setattr(statistics_laws, "tried", noted)
    return texts


def text_of(function: Any, row: tuple[str, ...] = (), column: tuple[str, ...] = ()) -> str:
    return trace(function, dict.fromkeys(row, "real"), dict.fromkeys(column, "real")).text


@pytest.mark.parametrize("name", FOLDS)
def test_functions_of_tests(name: str) -> None:
    function, _, row, column = FOLDS[name]
    assert tried(text_of(function, row, column)) is True


MODULES = (
    "noisy_or",
    "divergences",
    "kernel_density",
    "policy_gradient",
    "nearest_neighbours",
    "contrastive",
)
MODULES += ("token_losses", "kernel_sums", "bench.folds", "bench.kernel_sums", "monoidreduce.demo.policy")


@pytest.mark.parametrize("module", MODULES)
def test_functions_of_examples(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in (ROOT, ROOT / "examples"):
        monkeypatch.syspath_prepend(str(path))
    functions = [of for of in vars(importlib.import_module(module)).values() if isinstance(of, Statistics)]
    assert functions
    for of in functions:
        data = tuple(name for name in of._names if name not in ARGUMENTS)
        for row, column in ((data, ()), ((), data)):
            assert tried(text_of(of._function, row, column)) is True


@pytest.mark.parametrize("fold", [*distillation._LSE.values(), *distillation._FOLDS.values()], ids=repr)
def test_functions_of_distillation(fold: Any) -> None:
    data = tuple(name for name in fold._names if name not in ARGUMENTS)
    assert tried(text_of(fold._function, data)) is True


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(fold=random_folds())
def test_random_functions(fold: Any) -> None:
    try:
        assert tried(text_of(fold.function, ("t",), ("w",))) is True
    except TraceError as error:
        assert "too many values" in str(error)


# Functions of a score with a narrow domain, kinks, ties and infinities; and those that are smooth nowhere.
SMOOTH: tuple[Callable[[Any], Any], ...] = (
    lambda x: stat.total(torch.log(x)),
    lambda x: stat.total(torch.log(-x)),
    lambda x: stat.total(torch.log(1 - x * x)),
    lambda x: stat.total(torch.log(x - 100)),
    lambda x: stat.total(1 / x),
    lambda x: stat.total(torch.exp(torch.exp(x))),
    lambda x: stat.total(torch.exp(200 * x)),
    lambda x: stat.total(torch.sqrt(torch.where(x > 0, x, 0.0))),
    lambda x: stat.total(torch.where(x > 0, torch.log(x), 0.0)),
    lambda x: stat.total((x + 1e12) - 1e12),
    lambda x: stat.total(x.detach() * x),
    lambda x: stat.total(torch.sign(x) * torch.abs(torch.clamp(x, -1, 1))),
    lambda x: stat.largest(F.relu(x)),
    lambda x: stat.smallest(F.relu(x)),
    lambda x: stat.largest(torch.tanh(6 * x)),
    lambda x: stat.largest(torch.where(x > 0, x, -math.inf)),
    lambda x: stat.softmax(torch.where(x > 0, x, -math.inf)).mean(torch.log(x)),
    lambda x: stat.softmax(torch.where(x > 1e9, x, -math.inf)).logsumexp,
    lambda x: stat.softmax(1000 * x).mean(x),
    lambda x: stat.count(x > 1),
    lambda x: stat.total(0.5),
)
NOWHERE: tuple[Callable[[Any], Any], ...] = (
    lambda x: stat.total(torch.log(-1 - x * x)),
    lambda x: stat.total(1 / (x - x)),
    lambda x: stat.softmax(x + math.inf).logsumexp,
    lambda x: stat.count(torch.exp(torch.log(x)) >= x),  # rounding decides
)


@pytest.mark.parametrize("number", range(len(SMOOTH)))
def test_domains_and_kinks(number: int) -> None:
    assert tried(text_of(lambda score: dict(x=SMOOTH[number](score)))) is True


@pytest.mark.parametrize("number", range(len(NOWHERE)))
def test_a_function_that_is_finite_nowhere_is_not_refused(number: int) -> None:
    of = mr.statistics(lambda score: dict(x=NOWHERE[number](score)))
    assert tried(text_of(of._function)) is False
    assert of(A, B).x.shape == (3,)


def test_domains_of_data() -> None:
    def logarithms(score, t, w):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(torch.log(t) * torch.log(w) * score))

    def quotients(score, label):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(score * (5 // label)))

    def by_zero(score, label):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(score * (5 // (label - label))))

    assert tried(text_of(logarithms, ("t",), ("w",))) is True
    assert tried(text_of(quotients)) is True
    assert tried(text_of(by_zero)) is False


def refused(of: Any, *operands: Tensor, **data: Any) -> mr.MonoidLawError:
    with pytest.raises(mr.MonoidLawError) as caught:
        of(*operands, **data)
    return caught.value


# Constants that no other test has: what is derived of a text is remembered.
def test_a_wrong_derivative_is_caught(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    wrong = replace(OPERATIONS["tanh"], pull=lambda g, y, x: (g * (1.0 - y),))
    monkeypatch.setitem(OPERATIONS, "tanh", wrong)

    @mr.statistics
    def bent(score, other, t, w):  # type: ignore[no-untyped-def]
        return dict(a=stat.total(score), b=stat.total(torch.tanh(1.0625 * other)))

    line = bent._function.__code__.co_firstlineno + 1  # of def, below its decorator
    error = refused(bent, A, B, A, B, row={"t": A[:, 0]}, column={"w": B[:, 0]})
    assert str(error).startswith(f"{__file__}:{line}: bent breaks the law of gradients: ")
    assert "the derived gradient by other = autograd's" in str(error)
    assert error.law == "gradients" and {"row", "column", "score", "other"} < {*error.counterexample}
    assert error.counterexample["found"] != error.counterexample["expected"]
    # Nothing wrong is remembered: who mends it is not refused.
    refused(bent, A, B, A, B, row={"t": A[:, 0]}, column={"w": B[:, 0]})
    assert not [*folder.glob("*/*.kept")]


@pytest.mark.parametrize("of", ("row", "column"))
def test_a_wrong_derivative_by_data_is_caught(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = replace(OPERATIONS["erf"], pull=lambda g, y, x: (g * 2.0,))
    monkeypatch.setitem(OPERATIONS, "erf", wrong)

    @mr.statistics
    def bent(score, t):  # type: ignore[no-untyped-def]
        return dict(a=stat.softmax(score + torch.erf(1.0625 * t)).logsumexp)

    data = {"row": A[:, 0]}.get(of, B[:, 0])
    assert f"the derived gradient by {of} 0 = autograd's" in str(refused(bent, A, B, **{of: {"t": data}}))


def test_a_wrong_instruction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bytecode.INSTRUCTIONS, "sigmoid", bytecode.INSTRUCTIONS["tanh"])

    @mr.statistics
    def bent(score):  # type: ignore[no-untyped-def]
        p = stat.softmax(score)
        return dict(lse=p.logsumexp, mean=p.mean(torch.sigmoid(1.1875 * score)))

    error = refused(bent, A, B)
    assert error.law == "values"
    assert "mean by the CPU engine = mean by plain torch" in str(error)


def test_a_wrong_instruction_of_the_gradient_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bytecode.INSTRUCTIONS, "neg", bytecode.INSTRUCTIONS["abs"])

    @mr.statistics
    def bent(score):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(1.0 / (1.3125 + torch.square(score))))

    assert refused(bent, A, B).law == "gradients"


def program_with(name: str, factor: float) -> str:
    """A program with one operation, of scores and data, and a constant of its own."""
    numbers = {"real": iter((2, 3, 4)), "index": iter((6, 5, 6)), "bool": iter((7, 8))}
    nodes: list[tuple[Any, ...]] = [
        ("score",),
        ("real", factor.hex()),
        ("mul", 0, 1),
        ("row", 0),
        ("column", 0),
        ("row_index", 0),
        ("position",),
        ("lt", 2, 3),
        ("index_lt", 5, 6),
        (name, *(next(numbers[kind]) for kind in OPERATIONS[name].kinds[:-1])),
    ]
    nodes += {"real": [], "index": [("to_real", 9)], "bool": [("where", 9, 3, 4)]}[OPERATIONS[name].kinds[-1]]
    nodes.append(("mul", len(nodes) - 1, 2))
    return Program(tuple(nodes), totals=(len(nodes) - 1,)).pruned()[0].text


@pytest.mark.parametrize("name", [name for name, of in OPERATIONS.items() if of.pull])
def test_every_wrong_derivative_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By each argument, off by a thousandth."""

    def off(g: Any) -> Any:
        return g._replace(gradient=g.gradient * 1.001) if isinstance(g, Selected) else g * 1.001

    of = OPERATIONS[name]
    assert of.pull is not None and tried(program_with(name, 1.125)) is True
    for at in (at for at, kind in enumerate(of.kinds[:-1]) if kind == "real"):

        def wrong(*args: Any, at: int = at, pull: Any = of.pull) -> Any:
            return tuple(off(g) if i == at else g for i, g in enumerate(pull(*args)))

        monkeypatch.setitem(OPERATIONS, name, replace(of, pull=wrong))
        found = tried(program_with(name, 1.25 + at / 64))
        assert isinstance(found, Broken) and found.of[0] not in ("value", "index")


# Equal scores are not drawn. "share" is of derived programs alone, and "gather" of attention's.
@pytest.mark.parametrize("name", sorted(OPERATIONS.keys() - {"share", "gather", "index_gather", *SAME}))
def test_every_wrong_instruction_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another in its place that takes the same."""
    kinds, alike = OPERATIONS[name].kinds, {"gather", *SAME, name}
    alike |= {"lt", "le"} if name in ("lt", "le") else set()
    others = (of for of in OPERATIONS if OPERATIONS[of].kinds == kinds and of not in alike)
    for k, other in enumerate(others):
        monkeypatch.setitem(bytecode.INSTRUCTIONS, name, bytecode.INSTRUCTIONS[other])
        found = tried(program_with(name, 1.75 + k / 64))
        assert isinstance(found, Broken)


@pytest.mark.parametrize("tie", (False, True))
def test_a_wrong_column_is_caught_but_for_ties(tie: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def next_column(*args: Any) -> Any:
        values, low, indices = fold(*args)
        return values, low, (indices + 1) % 20

    fold = passes.fold
    monkeypatch.setattr(passes, "fold", next_column)

    @mr.statistics
    def tied(score):  # type: ignore[no-untyped-def]
        return dict(best=stat.largest(score * (0.0 if tie else 1.4375)))

    if tie:
        tied(A, B)
    else:
        assert "best.index by the CPU engine" in str(refused(tied, A, B))


def test_a_program_from_elsewhere_is_refused_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(bytecode.INSTRUCTIONS, "sigmoid", bytecode.INSTRUCTIONS["tanh"])
    text = text_of(lambda score: dict(x=stat.total(torch.sigmoid(1.5625 * score))))
    with pytest.raises(mr.MonoidLawError, match="value 0 by the CPU engine") as caught:
        torch.ops.monoidreduce.statistics(A, B, None, None, None, None, None, None, text, 1.0, None)
    assert str(caught.value).startswith(f"{__file__}:")


def test_a_verdict_is_kept(tries: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    factor = 1.75

    @mr.statistics
    def scaled(score):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(torch.exp(factor * score)))

    scaled(A, B)
    scaled(A.double(), B.double())
    assert len(tries) == 1 and len([*folder.glob("*/*.kept")]) == 1
    forget()
    scaled(A, B)
    assert len(tries) == 1
    factor = 1.875  # another program: a constant may decide which of its branches is seen
    scaled(A, B)
    assert len(tries) == 2
    factor = 1.75
    monkeypatch.setattr(statistics_laws, "__version__", "of another library")
    forget()
    scaled(A, B)
    assert len(tries) == 3
    monkeypatch.setenv("MONOIDREDUCE_CACHE_DIR", "off")
    forget()
    scaled(A, B)
    scaled(A, B)
    assert len(tries) == 4


def test_what_cannot_be_tried_is_not_refused(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As in a process that was forked after torch used a GPU for gradients."""

    def no_autograd(*_: Any, **__: Any) -> Any:
        raise RuntimeError("Unable to handle autograd's threading in combination with fork")

    monkeypatch.setattr(torch.autograd, "grad", no_autograd)
    of = mr.statistics(lambda score: dict(x=stat.total(torch.exp(1.9375 * score))))
    torch.testing.assert_close(of(A, B), of.reference(A, B))
    assert not [*folder.glob("*/*.kept")]


def test_errors_of_the_engine_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug of the engine")

    monkeypatch.setattr(passes._C, "statistics_backward", broken)
    with pytest.raises(RuntimeError, match="a bug of the engine"):
        mr.statistics(lambda score: dict(x=stat.total(torch.exp(1.6875 * score))))(A, B)


def test_what_was_not_compared_is_not_remembered(folder: Path, tries: list[str]) -> None:
    """A function that is finite nowhere among the elements."""
    nowhere = mr.statistics(lambda score: dict(x=stat.total(torch.log(score - 1e6))))
    for _ in range(2):
        nowhere(A, B)
        forget()
    assert len(tries) == 2 and not [*folder.glob("*/*.kept")]


def test_nothing_is_tried_without_numbers(tries: list[str]) -> None:
    of = mr.statistics(lambda score: dict(x=stat.total(torch.exp(1.8125 * score))))
    of(A.to("meta"), B.to("meta"))
    of.explain(A, B)
    of.reference(A, B)
    with FakeTensorMode() as fake:
        of(fake.from_tensor(A), fake.from_tensor(B))

    class Module(torch.nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Any:
            return of(a, b).x

    exported = torch.export.export(Module(), (A, B))
    compiled = torch.compile(Module(), backend="aot_eager", fullgraph=True)
    assert not tries
    torch.testing.assert_close(exported.module()(A, B), compiled(A, B))
    assert len(tries) == 1


MODES: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "meta": lambda: torch.device("meta"),
    "anomalies": torch.autograd.detect_anomaly,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def square_root(score):  # type: ignore[no-untyped-def]
    """Its gradient is NaN at negative scores."""
    return dict(x=stat.total(torch.sqrt(torch.where(score > 0, score, 0.0))))


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of the programs that are tried."""
    found: list[Any] = []

    def noted(text: str) -> Any:
        found.append(tried(text))
        return found[-1]

    monkeypatch.setattr(statistics_laws, "tried", noted)
    return found


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
def test_whatever_mode_is_on(mode: str, verdicts: list[Any]) -> None:
    of = mr.statistics(square_root)
    with MODES[mode]():
        of(A, B)
    assert verdicts == ([] if mode == "anomalies" else [True])  # which would refuse what is not finite
    of(A, B)
    assert verdicts == [True]


def test_under_transforms(verdicts: list[Any]) -> None:
    of = mr.statistics(square_root)
    of_members = torch.func.vmap(torch.func.grad(lambda a: of(a, B.exp()).x.sum()))(A.exp()[None])
    assert verdicts == [True] and of_members.isfinite().all()


def test_nothing_is_tried_by_an_import_or_a_decorator() -> None:
    script = (
        "import monoidreduce as mr, sys\n"
        "mr.statistics(lambda score: dict(x=mr.stat.total(score)))\n"
        "print('monoidreduce.program.statistics_laws' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "False"
