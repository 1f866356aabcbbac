"""The C++ that programs become: the host's compiler takes it, and it computes what torch does."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
from folds import FOLDS, fold_inputs, outputs_of, random_folds
from host_kernels import HostKernels
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_statistics import assert_exact, with_gradients

import monoidreduce as mr
from monoidreduce.folds.cuda.cuda_source import fold_source, gradient_source
from monoidreduce.folds.modified_as_statistics import _of_statistics
from monoidreduce.folds.program.mods import trace_mods
from monoidreduce.folds.program.program import with_sizes
from monoidreduce.folds.program.tracing import trace

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
F64 = torch.float64


@pytest.fixture
def host(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> HostKernels:
    kernels = HostKernels(tmp_path_factory.mktemp("kernels"))
    kernels.install(monkeypatch)
    return kernels


@pytest.mark.parametrize("name", FOLDS)
def test_outputs_and_gradients(name: str, host: HostKernels) -> None:
    for shape, columns, width in (((37,), 211, 9), ((70,), 7, 5)):
        fold, call = fold_inputs(name, shape, columns, width)
        found = with_gradients(fold, call)
        assert host.known or name == "attention"  # whose kernels are those of the operator
        assert_exact(found, with_gradients(fold.reference, call))


def check_random_function(host: HostKernels, fold: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).requires_grad_()

    call: dict[str, Any] = {"a": leaf(19, 3), "b": leaf(83, 3)}
    if fold.scores == 2:
        call |= {"other_a": leaf(19, 2), "other_b": leaf(83, 2)}
    call["label"] = torch.randint(-1, 84, (19,), generator=generator)
    call |= {"row": {"t": leaf(19)}, "column": {"w": leaf(83)}, "scale": 0.7}
    of = mr.statistics(fold.function)
    assert_exact(with_gradients(of, call), with_gradients(of.reference, call))


RANDOM = settings(
    max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,)
)  # each is compiled


@RANDOM
@given(fold=random_folds(), seed=st.integers(0, 1000))
def test_random_functions(host: HostKernels, fold: Any, seed: int) -> None:
    check_random_function(host, fold, seed)


@pytest.mark.release
@settings(RANDOM, max_examples=10)
@given(fold=random_folds(), seed=st.integers(0, 1000))
def test_many_random_functions(host: HostKernels, fold: Any, seed: int) -> None:
    check_random_function(host, fold, seed)


def test_products_are_not_fused_with_sums() -> None:
    """A log weight of 20 must have the same bits in both passes."""
    program = trace(lambda score, w: {"total": mr.stat.total(score * w + w / score)}, {}, {"w": "real"})
    for source in (fold_source(program.text, 0, 0, 1, 0), gradient_source(program.text, 0, 0, 1, 0)):
        assert "product(" in source.text and "quotient(" in source.text
        assert " * " not in source.text and " / " not in source.text


def test_dropout_in_a_fold(host: HostKernels) -> None:
    """A derivative of attention with dropout is a fold, whose elements have no indices of queries."""
    program = trace_mods(None, None, beside=(0.0, "", 0.4)).text
    text, integers = _of_statistics(program, False, False)
    call = (with_sizes(text, (0, 2)), 0, len(integers), 0, 0, ())  # the place of the seed, and two heads
    assert "is_below(" in fold_source(*call).text
    host._compiled(fold_source, call, F64)


def test_elements_that_are_not_finite(host: HostKernels) -> None:
    """An element of log weight -inf is not there; +inf and NaN reach their row."""

    @mr.statistics
    def fold(score: Any, c: Any) -> Any:
        p = mr.stat.softmax(score * c)
        return dict(
            lse=p.logsumexp,
            mean=p.mean(1 / (score * c)),
            best=mr.stat.largest(score * c),
            counted=mr.stat.count(score > 0.5),
        )

    infinite = float("inf")
    column = torch.tensor([1.0, -infinite, infinite, float("nan"), 0.0], dtype=F64)
    a, b = torch.tensor([[1.0], [0.0]], dtype=F64), torch.ones(5, 1, dtype=F64)
    for kept in ([0, 1, 4], [1], [0, 2], [3, 0], [1, 1, 1], [2, 3]):
        found = fold(a, b[kept], column={"c": column[kept]})
        expected = fold.reference(a, b[kept], column={"c": column[kept]})
        for ours, theirs in zip(outputs_of(found), outputs_of(expected), strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


@pytest.mark.parametrize("returned", ("largest", "k largest", "total", "both"))
def test_gumbel_numbers_of_largest_values_are_approximate(returned: str) -> None:
    """In a total over the columns their errors would add up. Logarithms of others may be near 0."""

    def gumbel(score: Any, seed: Any) -> dict[str, Any]:
        noisy = score - torch.log(-torch.log(mr.stat.uniform(seed)))
        k = 4 if returned == "k largest" else 1
        found = {} if returned == "total" else {"best": mr.stat.largest(noisy, k)}
        return found | ({"total": mr.stat.total(noisy)} if returned in ("total", "both") else {})

    def of_scores(score: Any) -> dict[str, Any]:
        return {"best": mr.stat.largest(-torch.log(-torch.log(score)))}

    drawn, plain = trace(gumbel, {"seed": "int64"}, {}), trace(of_scores, {}, {})
    counts = [len(drawn.sources[kind]) for kind in ("row", "row_index", "column", "column_index")]
    approximate = "log_of_exponential(" in fold_source(drawn.text, *counts).text
    assert approximate == (returned in ("largest", "k largest"))
    assert "log_of_exponential(" not in fold_source(plain.text, 0, 0, 0, 0).text
