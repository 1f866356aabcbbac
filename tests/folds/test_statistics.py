"""statistics on the CPU: against plain torch with all scores stored."""

from __future__ import annotations

import copy
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from folds import FOLDS, fold_inputs, leaves_of, outputs_of, random_folds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tolerance import accuracy_failures
from torch import Tensor

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce._ops.dry_run import dry_run
from monoidreduce.folds.explain import differentiated_tensors
from monoidreduce.hardware import find

stat = mr.stat
F64 = torch.float64


def with_gradients(fold: Any, call: dict[str, Any], seed: int = 0) -> list[Tensor]:
    """The outputs of a call, then all gradients of a random combination of them."""
    outputs = outputs_of(fold(**call))
    leaves = leaves_of(call)
    generator = torch.Generator().manual_seed(seed)
    real = [t for t in outputs if t.is_floating_point() and t.requires_grad]
    upstream = [torch.randn(t.shape, generator=generator, dtype=F64).to(t.dtype) for t in real]
    if not real:  # the function does not depend on its arguments
        return [*outputs, *map(torch.zeros_like, leaves)]
    gradients = torch.autograd.grad(real, leaves, upstream, materialize_grads=True, allow_unused=True)
    return [*outputs, *gradients]


def assert_exact(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-11) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        finite = theirs.detach()[theirs.isfinite()].abs()
        scale = max(1.0, float(finite.max())) if len(finite) else 1.0
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * scale, equal_nan=True)


@pytest.mark.isa
@pytest.mark.oldest
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize(
    "shape, columns, width", (((37,), 211, 9), ((1,), 1, 3), ((2, 3, 4), 130, 64), ((70,), 7, 5))
)
def test_float64(name: str, shape: tuple[int, ...], columns: int, width: int) -> None:
    fold, call = fold_inputs(name, shape, columns, width)
    assert_exact(with_gradients(fold, call), with_gradients(fold.reference, call))


@pytest.mark.isa
@pytest.mark.parametrize("name", FOLDS)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
def test_accuracy(name: str, dtype: torch.dtype) -> None:
    fold, call = fold_inputs(name, (400,), 513, 16, dtype)
    exact = {k: _double(v) for k, v in call.items()}
    results = [
        with_gradients(of, tensors)
        for of, tensors in ((fold, call), (fold.reference, exact), (fold.reference, call))
    ]
    names = [
        *(f"out{i}" for i in range(len(results[0]) - len(leaves_of(call)))),
        *(f"d_{i}" for i in range(len(leaves_of(call)))),
    ]
    failures = []
    for output, y, ref, base in zip(names, *results, strict=True):
        if y.is_floating_point():
            failures += accuracy_failures(output, y, ref.double(), base, dtype, 400)
    assert not failures, "\n".join(failures)


def _double(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _double(t) for name, t in value.items()}
    return value.detach().double().requires_grad_() if value.is_floating_point() else value


def check_random_function(fold: Any, rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=F64).requires_grad_()

    call: dict[str, Any] = {"a": leaf(rows, 3), "b": leaf(columns, 3)}
    if fold.scores == 2:
        call |= {"other_a": leaf(rows, 2), "other_b": leaf(columns, 2)}
    label = torch.randint(-1, columns + 1, (rows,), generator=generator)
    call |= {"label": label, "row": {"t": leaf(rows)}, "column": {"w": leaf(columns)}, "scale": 0.7}
    of = mr.statistics(fold.function)
    assert_exact(with_gradients(of, call), with_gradients(of.reference, call))


RANDOM_CALLS = {"rows": st.integers(1, 40), "columns": st.integers(1, 140), "seed": st.integers(0, 1000)}
RANDOM = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@RANDOM
@given(fold=random_folds(), **RANDOM_CALLS)
def test_random_functions(fold: Any, rows: int, columns: int, seed: int) -> None:
    check_random_function(fold, rows, columns, seed)


@pytest.mark.release
@settings(RANDOM, max_examples=300)
@given(fold=random_folds(), **RANDOM_CALLS)
def test_many_random_functions(fold: Any, rows: int, columns: int, seed: int) -> None:
    check_random_function(fold, rows, columns, seed)


@pytest.mark.oldest
def test_no_columns_and_no_rows() -> None:
    fold, call = fold_inputs("token_stats", (5,), 3)
    empty = {**call, "b": torch.zeros(0, 9, dtype=F64, requires_grad=True)}
    lse, mean, target, best = fold(**empty)
    assert (lse == -math.inf).all() and (mean == 0).all() and (target == 0).all()
    assert (best.value == -math.inf).all() and (best.index == -1).all()
    for gradient in torch.autograd.grad(lse.sum() + mean.sum() + best.value.sum(), leaves_of(empty)):
        assert (gradient == 0).all()
    none = {
        **call,
        "a": torch.zeros(0, 9, dtype=F64, requires_grad=True),
        "label": torch.zeros(0, dtype=torch.long),
    }
    results = with_gradients(fold, none)
    assert results[0].shape == (0,) and (results[-1] == 0).all() and results[-1].shape == (3, 9)


@pytest.mark.parametrize(("rows", "columns"), ((0, 5), (4, 0)))
def test_a_captured_matrix_without_elements(rows: int, columns: int) -> None:
    weights = torch.ones(rows, columns, dtype=F64, requires_grad=True)

    @mr.statistics
    def weighted(score: Any, row: Any, column: Any) -> Any:
        return {"total": stat.total(score * weights[row, column])}

    a, b = (torch.ones(n, 9, dtype=F64, requires_grad=True) for n in (rows, columns))
    total = weighted(a, b).total
    assert total.shape == (rows,) and not total.any()
    for leaf, gradient in zip(
        (a, b, weights), torch.autograd.grad(total.sum(), (a, b, weights)), strict=True
    ):
        assert gradient.shape == leaf.shape and not gradient.any()


def test_scores_that_are_not_finite() -> None:
    @mr.statistics
    def of_scores(score: Any) -> Any:
        p = stat.softmax(score)
        return dict(lse=p.logsumexp, mean=p.mean(score), best=stat.largest(score), least=stat.smallest(score))

    inf = math.inf
    a = torch.eye(5, dtype=F64)
    rows = [[1, 2, 3], [-inf, 2, 3], [-inf, -inf, -inf], [1, inf, 2], [1, math.nan, 2]]
    # One row of scores each: a product with b would meet 0 times infinity.
    for row in rows:
        b = torch.tensor(row, dtype=F64)[:, None].requires_grad_()
        found, expected = (
            with_gradients(of, {"a": a[:1, :1], "b": b}) for of in (of_scores, of_scores.reference)
        )
        assert_exact(found, expected)


def test_an_element_of_log_weight_minus_infinity_is_not_there() -> None:
    @mr.statistics
    def masked(score: Any, column: Any) -> Any:
        log_weight = torch.where(column < 2, score, -math.inf)
        p = stat.softmax(log_weight)
        return dict(
            lse=p.logsumexp,
            entropy=p.logsumexp if False else p.mean(log_weight),
            none=stat.softmax(torch.where(score > 1e9, 0.0, -math.inf)).mean(score),
        )

    a, b = torch.randn(4, 3, dtype=F64, requires_grad=True), torch.randn(6, 3, dtype=F64, requires_grad=True)
    scores = a @ b[:2].T
    s = masked(a, b)
    torch.testing.assert_close(s.lse, scores.logsumexp(1))
    torch.testing.assert_close(s.entropy, (scores.softmax(1) * scores).sum(1))
    assert (s.none == 0).all()
    found = torch.autograd.grad(s.lse.sum() + s.entropy.sum() + s.none.sum(), (a, b))
    expected = torch.autograd.grad(scores.logsumexp(1).sum() + (scores.softmax(1) * scores).sum(), (a, b))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.isa
@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
def test_equal_largest(dtype: torch.dtype) -> None:
    best = mr.statistics(lambda score: dict(best=stat.largest(score), least=stat.smallest(score)))
    a = torch.ones(3, 1, dtype=dtype, requires_grad=True)
    b = torch.zeros(300, 1, dtype=dtype)
    b[[17, 99, 250]], b[[5, 298]] = 2.0, -2.0
    b.requires_grad_()
    s = best(a, b)
    assert (s.best.index == 17).all() and (s.least.index == 5).all()
    (gradient,) = torch.autograd.grad(s.best.value.sum() + 2 * s.least.value.sum(), b)
    assert gradient[17] == 3 and gradient[5] == 6 and gradient.count_nonzero() == 2


@pytest.mark.parametrize("label", (-1, 7, 2**31, 2**40, -(2**40), 2**63 - 1))
@pytest.mark.parametrize("dtype", (torch.float32, F64), ids=str)
def test_label_out_of_range(label: int, dtype: torch.dtype) -> None:
    fold, call = fold_inputs("token_stats", (4,), 7, dtype=dtype)
    call["label"] = torch.full((4,), label)
    assert (fold(**call).target == 0).all()


def of_labels(step: Tensor) -> Any:
    prior = torch.arange(1.0, 8.0, dtype=F64)

    @mr.statistics
    def fold(score: Any, row: Any, column: Any, label: Any, t: Any) -> Any:
        p = stat.softmax(score / t)
        logit = torch.where(column == label, score, 0.0)
        return dict(
            lse=p.logsumexp,
            mean=p.mean(torch.log(score.abs()) + prior[label]),
            target=stat.total(logit * prior[label] / step[row]),
            best=stat.largest(score),
            least=stat.smallest(score * t),
            above=stat.count(score > 0),
        )

    return fold


@pytest.mark.isa
@pytest.mark.parametrize("ignore_index", (-100, 3))
@pytest.mark.parametrize("all_of_them", (False, True))
def test_a_row_of_ignore_index_is_an_empty_fold(ignore_index: int, all_of_them: bool) -> None:
    """Whatever it, its data and what it indexes hold: as if the other rows were all."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 5, generator=generator, dtype=F64) for n in (6, 7))
    t = torch.tensor([0.7, 0.0, 1.0, 2.0, math.nan, 0.5], dtype=F64)
    step = torch.tensor([2.0, 0.0, 3.0, 4.0, 0.0, 5.0], dtype=F64)
    a[1], a[4] = math.nan, math.inf
    ignored = torch.tensor([False, True, False, False, True, False]) | all_of_them
    label = torch.tensor([6, 0, 1, 2, 0, -1]).masked_fill(ignored, ignore_index)
    leaves = [x.requires_grad_() for x in (a, b, t)]
    options = {} if ignore_index == -100 else {"ignore_index": ignore_index}
    alone = outputs_of(
        of_labels(step[~ignored])(a[~ignored], b, label=label[~ignored], row={"t": t[~ignored]})
    )
    real = [x for x in alone if x.is_floating_point()]
    of_alone = torch.autograd.grad(real, leaves, [torch.full_like(x, 0.5) for x in real])
    for call in (of_labels(step), of_labels(step).reference):
        found = outputs_of(call(a, b, label=label, row={"t": t}, **options))
        assert_exact([x[~ignored] for x in found], alone)
        nothing = (-math.inf, 0, 0, -math.inf, -1, math.inf, -1, 0)
        for x, of_nothing in zip(found, nothing, strict=True):
            assert (x[ignored] == of_nothing).all()
        real = [x for x in found if x.is_floating_point()]
        upstream = [torch.full_like(x, 0.5).masked_fill(ignored, math.nan) for x in real]
        assert_exact(list(torch.autograd.grad(real, leaves, upstream)), list(of_alone))


def test_ignore_index_is_checked() -> None:
    fold, call = fold_inputs("token_stats", (4,), 7)
    for value, error in ((1.5, TypeError), (2**63, ValueError), (None, TypeError)):
        with pytest.raises(error, match="ignore_index: expected an int"):
            fold(**call, ignore_index=value)


@pytest.mark.oldest
def test_numbers_are_constants_and_tensors_data() -> None:
    factor, tensor, table = 2.0, torch.tensor(3.0, dtype=F64, requires_grad=True), torch.randn(9, dtype=F64)

    def function(score: Any, column: Any, label: Any) -> Any:
        return dict(total=stat.total(factor * score * tensor + table[column] * table[label]))

    fold = mr.statistics(function)
    a, b = torch.randn(5, 3, dtype=F64), torch.randn(9, 3, dtype=F64)
    label = torch.randint(0, 9, (5,))

    def expected() -> Tensor:
        return (factor * (a @ b.T) * tensor + table * table[label][:, None]).sum(1)

    for _ in range(2):
        torch.testing.assert_close(fold(a, b, label=label).total, expected())
    factor = -1.0
    torch.testing.assert_close(fold(a, b, label=label).total, expected())
    with torch.no_grad():
        tensor.fill_(7.0)
    table = torch.randn(9, dtype=F64, requires_grad=True)
    torch.testing.assert_close(fold(a, b, label=label).total, expected())
    for ours, theirs in zip(
        torch.autograd.grad(fold(a, b, label=label).total.sum(), (tensor, table)),
        torch.autograd.grad(expected().sum(), (tensor, table)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_arguments_with_a_default_keep_it() -> None:
    def scaled(score: Any, by: float = 3.0) -> Any:
        return dict(x=stat.total(score * by))

    a, b = torch.ones(2, 2), torch.ones(5, 2)
    assert (mr.statistics(scaled)(a, b).x == 30).all()


class Settings:
    factor = 1.0


def test_what_is_read_of_an_object_is_never_stale() -> None:
    settings_of_it, scale = Settings(), torch.tensor(0.0, dtype=F64)
    fold = mr.statistics(lambda score: dict(total=stat.total(score * settings_of_it.factor * scale.exp())))
    a, b = torch.randn(5, 3, dtype=F64), torch.randn(9, 3, dtype=F64)
    for settings_of_it.factor, exponent in ((1.0, 0.0), (2.0, 0.0), (2.0, 1.0)):
        scale.fill_(exponent)
        expected = (a @ b.T).sum(1) * settings_of_it.factor * math.exp(exponent)
        torch.testing.assert_close(fold(a, b).total, expected)


def test_rows_heads_and_batches() -> None:
    slopes = torch.rand(3, dtype=F64, requires_grad=True)

    @mr.statistics
    def alibi(score: Any, row: Any, column: Any, head: Any, batch: Any) -> Any:
        near = torch.where(column <= row, score + slopes[head] * (column - row) + batch, -math.inf)
        return dict(lse=stat.softmax(near).logsumexp, seen=stat.count(column <= row))

    a, b = torch.randn(2, 3, 7, 5, dtype=F64), torch.randn(9, 5, dtype=F64)
    row, column = torch.arange(7)[:, None], torch.arange(9)
    scores = a @ b.T + slopes[:, None, None] * (column - row) + torch.arange(2)[:, None, None, None]
    s = alibi(a, b)
    expected = scores.masked_fill(column > row, -math.inf).logsumexp(-1)
    torch.testing.assert_close(s.lse, expected)
    assert (s.seen == row.squeeze() + 1).all() and s.seen.dtype == torch.int64
    torch.testing.assert_close(
        torch.autograd.grad(s.lse.sum(), slopes), torch.autograd.grad(expected.sum(), slopes)
    )


def test_data_of_every_dtype() -> None:
    @mr.statistics
    def same(score: Any, document: Any, of_column: Any, kept: Any, weight: Any) -> Any:
        inside = (document == of_column) & kept
        return dict(sum=stat.total(torch.where(inside, score * weight, 0.0)), count=stat.count(inside))

    a, b = torch.randn(6, 3), torch.randn(8, 3)
    document, of_column = torch.tensor([0, 0, 1, 1, 2, 2]), torch.arange(8, dtype=torch.int32) // 3
    kept, weight = torch.arange(8) % 2 == 0, torch.rand(6, dtype=torch.float16)
    s = same(
        a, b, row={"document": document, "weight": weight}, column={"of_column": of_column, "kept": kept}
    )
    inside = (document[:, None] == of_column) & kept
    torch.testing.assert_close(s.sum, (a @ b.T * weight[:, None].float() * inside).sum(1))
    assert (s.count == inside.sum(1)).all()


def test_strides_scale_and_a_single_row() -> None:
    fold, call = fold_inputs("tempered", (12,), 50, 6)
    a, b = call["a"].detach(), call["b"].detach()
    expected = fold.reference(a, b, scale=-0.3)
    strided = fold(a.T.contiguous().T, b.flip(0).flip(0)[:, :], scale=-0.3)
    assert_exact(list(strided), list(expected))
    assert_exact(list(fold(a[0], b, scale=-0.3)), [t[0] for t in expected])


def test_sums_of_many_columns_are_as_accurate_as_torchs(device: torch.device) -> None:
    @mr.statistics
    def sums(score: Any) -> dict[str, Any]:
        p = mr.stat.softmax(score * 0.1)
        return dict(total=mr.stat.total(score.abs()), mean=p.mean(score.abs()))

    a, b = torch.randn(64, 16, device=device), torch.randn(100_000, 16, device=device)
    exact, stored = sums.reference(a.double(), b.double()), sums.reference(a, b)
    for y, ref, base in zip(sums(a, b), exact, stored, strict=True):
        assert (y - ref).norm() <= 2 * (base - ref).norm()


@pytest.mark.isa
@pytest.mark.parametrize(("rows", "columns"), ((1, 901), (16, 50), (17, 16), (40, 1), (40, 50)))
def test_gradients_of_data_see_the_scores_of_the_forward_pass(rows: int, columns: int) -> None:
    """To the last bit: the columns' are sums of a fold of the exchanged operands."""

    def value(score, column, label):  # type: ignore[no-untyped-def]
        return dict(value=stat.total(torch.where(column == label, score, 0.0)))

    def difference(score, column, label, of_row, of_column, known):  # type: ignore[no-untyped-def]
        found = of_row * of_column * (score - known)
        return dict(found=stat.total(torch.where(column == label, found, 0.0)))

    torch.manual_seed(0)
    call: dict[str, Any] = {"a": torch.randn(rows, 264), "b": torch.randn(columns, 264)}
    call["label"] = torch.randint(0, columns, (rows,))
    known = mr.statistics(value)(**call).value
    of_row, of_column = (torch.ones(count, requires_grad=True) for count in (rows, columns))
    data = {"row": {"of_row": of_row, "known": known}, "column": {"of_column": of_column}}
    found = mr.statistics(difference)(**call, **data).found
    for of in (found, *torch.autograd.grad(found.sum(), (of_row, of_column))):
        assert not of.any()


def test_threads_and_determinism() -> None:
    fold, call = fold_inputs("token_stats", (130,), 1500, 24, torch.float32)
    first = with_gradients(fold, call)
    again = with_gradients(fold, call)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


def test_explain_names_the_paths_that_are_taken() -> None:
    fold, call = fold_inputs("token_stats", (5,), 30, dtype=torch.float32)
    explanation = fold.explain(**call)
    before = _C.path_counts()
    fold(**call).lse.sum().backward()
    for path in (explanation.forward, explanation.backward):
        assert _C.path_counts()[path] == before.get(path, 0) + 1
    assert "a program of" in str(explanation)


@mr.statistics
def of_this_module(score: Any) -> Any:
    return dict(x=stat.total(score))


def test_copies_and_pickles_are_the_same_object() -> None:
    of_this_module(torch.ones(1, 1), torch.ones(2, 1))
    module = torch.nn.Module()
    module.fold = of_this_module
    assert copy.deepcopy(module).fold is of_this_module
    assert pickle.loads(pickle.dumps(of_this_module)) is of_this_module
    assert of_this_module.__name__ == "of_this_module"


def test_threads_share_a_function() -> None:
    """Each call has a program of its own, though the last is remembered."""
    factors = torch.arange(8)
    a, b = torch.ones(3, 2), torch.ones(5, 2)

    def call(k: int) -> bool:
        fold = mr.statistics(lambda score: dict(x=stat.total(score * k)))
        kinds = [fold(a, b).x, fold(a.double(), b.double()).x]
        shared = scaled(a, b, row={"t": factors[:3] if k % 2 else factors[:3].float()})
        return all((x == 10 * k).all() for x in kinds) and bool((shared.x == 10 * factors[:3]).all())

    scaled = mr.statistics(lambda score, t: dict(x=stat.total(score * t)))
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(40)))


@pytest.mark.parametrize("workspace", (1 << 20, 1 << 22))
def test_sums_of_parts_stay_within_the_workspace(workspace: int) -> None:
    """Of narrow rows on a GPU: each part of the columns has gradients of the operands and of all row data."""

    @mr.statistics
    def many(score: Any, c: Any, d: Any, e: Any, f: Any) -> Any:
        return dict(total=stat.total(c * score + d * score**2 + e * score**3 + f * score**4))

    sizes = (4096, 3), (1 << 18, 3), *[(4096,)] * 4
    a, b, *row = (torch.empty(size, device="meta", requires_grad=True) for size in sizes)
    call = {"a": a, "b": b, "row": dict(zip("cdef", row, strict=True)), "workspace": workspace}
    run = dry_run(many, call, differentiated_tensors(call), find("h100").facts(), assumes_compiler=True)
    of_rows = next(launch for launch in run.launches if launch.name == "statistics_row_gradient")
    assert of_rows.plan is not None and of_rows.plan.owned_rows is not None
    assert of_rows.plan.owned_rows.splits > 1
    assert sum(of_rows.arguments[name].bytes for name in ("da", "sums")) <= workspace
