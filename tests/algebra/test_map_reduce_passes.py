"""What map_reduce visits, and who computes gradients: pairs, forward_gradient and fused_backward."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import monoidreduce as mr
from monoidreduce.monoids import LogSumExp, LogWSum, Max, Sum

LSE, MEAN = LogSumExp.State, LogWSum.State


@pytest.fixture(autouse=True)
def one_thread(threads: None) -> None:
    torch.set_num_threads(1)


def rand(*shape: int, dtype: torch.dtype = torch.float64, device: Any = "cpu") -> Tensor:
    return torch.randn(shape, dtype=dtype, device=device, requires_grad=True)


def log_sum(a: Tensor, b: Tensor) -> LogSumExp.State:
    return LSE((a @ b.T).logsumexp(1))


def attend(q: Tensor, kv: tuple[Tensor, Tensor]) -> LogWSum.State:
    scores = q @ kv[0].T
    return MEAN(scores.logsumexp(1), scores.softmax(1) @ kv[1])


def gradients(outputs: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Under upstream gradients that are the same for outputs of the same shape."""
    generator = torch.Generator().manual_seed(7)
    upstream = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return torch.autograd.grad(tuple(outputs), inputs, upstream)


def same(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e, rtol=tolerance, atol=tolerance)


# --- pairs ---


def block_mask(kept: Callable[[slice, slice], bool], m: int, n: int, rows: int, columns: int) -> Tensor:
    mask = torch.zeros(m, n, dtype=torch.bool)
    for i in range(0, m, rows):
        for j in range(0, n, columns):
            here = slice(i, min(i + rows, m)), slice(j, min(j + columns, n))
            mask[here] = kept(*here)
    return mask


@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_pairs_left_out_are_masked(m: int, n: int, rows: int, columns: int, seed: int) -> None:
    """Values and gradients of attention under any mask of blocks, rows without a pair among them."""
    torch.manual_seed(seed)
    dropped = {(i, j) for i in range(m) for j in range(n) if torch.rand(()) < 0.6}

    def kept(i: slice, j: slice) -> bool:
        return (i.start, j.start) not in dropped

    q, k, v = rand(m, 4), rand(n, 4), rand(n, 3)
    found = mr.map_reduce(LogWSum(), attend, q, (k, v), pairs=kept, a_chunk=rows, b_chunk=columns)
    mask = block_mask(kept, m, n, rows, columns)
    scores = (q @ k.T).masked_fill(~mask, -math.inf)
    some = mask.any(1)
    assert (found.log_weight[~some] == -math.inf).all() and (found.value[~some] == 0).all()
    expected = scores[some].logsumexp(1), scores[some].softmax(1) @ v
    at_some = found.log_weight[some], found.value[some]
    same(at_some, expected)
    same(gradients(at_some, (q, k, v)), gradients(expected, (q, k, v)))


@pytest.mark.parametrize("forward_gradient", [False, True])
def test_causal_pairs_are_visited_and_no_others(forward_gradient: bool) -> None:
    """Each once a pass. project_fold masks the pairs on the diagonal."""
    visited: list[tuple[int, int]] = []

    def project_fold(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> LogSumExp.State:
        visited.append((int(a[1][0]), int(b[1][0])))
        scores = (a[0] @ b[0].T).masked_fill(a[1][:, None] < b[1], -math.inf)
        return LSE(scores.logsumexp(1))

    a, b, at = rand(20, 3), rand(20, 3), torch.arange(20)
    found = mr.map_reduce(
        LogSumExp(),
        project_fold,
        (a, at),
        (b, at),
        pairs=lambda i, j: j.start < i.stop,
        forward_gradient=forward_gradient,
        a_chunk=5,
        b_chunk=5,
    )
    causal = [(i, j) for i in range(0, 20, 5) for j in range(0, i + 1, 5)]
    assert visited == causal
    expected = (a @ b.T).masked_fill(at[:, None] < at, -math.inf).logsumexp(1)
    same(gradients(found, (a, b)), gradients([expected], (a, b)))
    assert visited == 2 * causal
    same([found.lse], [expected])


def test_pairs_are_asked_once_in_order() -> None:
    asked: list[tuple[int, int, int, int]] = []

    def pairs(i: slice, j: slice) -> bool:
        asked.append((i.start, i.stop, j.start, j.stop))
        return True

    a, b = rand(5, 2), rand(3, 2)
    mr.map_reduce(LogSumExp(), log_sum, a, b, pairs=pairs, a_chunk=3, b_chunk=2).lse.sum().backward()
    assert asked == [(0, 3, 0, 2), (0, 3, 2, 3), (3, 5, 0, 2), (3, 5, 2, 3)]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
def test_a_tensor_of_pairs_is_the_function(m: int, n: int, rows: int, columns: int, seed: int) -> None:
    """The same slice pairs in the same order, so the same bits. The tensor may change before backward."""
    torch.manual_seed(seed)
    kept = torch.rand(-(-m // rows), -(-n // columns)) < 0.6
    answers = kept.clone()
    q, k, v = rand(m, 4), rand(n, 4), rand(n, 3)
    found, expected = (
        mr.map_reduce(LogWSum(), attend, q, (k, v), pairs=pairs, a_chunk=rows, b_chunk=columns)
        for pairs in (answers, lambda i, j: bool(kept[i.start // rows, j.start // columns]))
    )
    answers.logical_not_()
    for ours, theirs in (
        (found, expected),
        (gradients(found, (q, k, v)), gradients(expected, (q, k, v))),
    ):
        assert all(torch.equal(f, e) for f, e in zip(ours, theirs, strict=True))


def test_a_tensor_of_pairs_under_compile() -> None:
    a, b = rand(5, 2), rand(4, 2)
    answers = torch.tensor([[True, False], [True, True]])

    def log_sums(answers: Tensor) -> Tensor:
        return mr.map_reduce(LogSumExp(), log_sum, a, b, pairs=answers, a_chunk=3, b_chunk=2).lse

    expected, found = log_sums(answers), torch.compile(log_sums, backend="eager")(answers)
    same([found], [expected])
    same(gradients([found], (a, b)), gradients([expected], (a, b)))


# --- forward_gradient ---


class Times(mr.Monoid["Times.State"]):
    """A product of numbers that are not 0: its local gradient depends on both of its arguments."""

    State = Sum.State

    def identity(self, like: Sum.State) -> Sum.State:
        return Sum.State(torch.ones_like(like.value))

    def combine(self, a: Sum.State, b: Sum.State) -> Sum.State:
        return Sum.State(a.value * b.value)

    def local_gradient(self, c: Sum.State, a: Sum.State, g: Sum.State) -> Sum.State:
        return Sum.State(g.value * c.value / a.value)


SCALAR: dict[str, tuple[Any, Callable[[Tensor, Tensor], Any], Callable[[Tensor, Tensor], Tensor]]] = {
    "lse": (LogSumExp(), log_sum, lambda a, b: (a @ b.T).logsumexp(1)),
    "sum": (Sum(), lambda a, b: Sum.State((a @ b.T).tanh().sum(1)), lambda a, b: (a @ b.T).tanh().sum(1)),
    "product": (
        Times(),
        lambda a, b: Sum.State((1 + (a @ b.T) ** 2 / 9).prod(1)),
        lambda a, b: (1 + (a @ b.T) ** 2 / 9).prod(1),
    ),
}


@pytest.mark.parametrize(
    ("m", "n", "a_chunk", "b_chunk"), [(7, 11, 3, 4), (5, 5, 9, 9), (1, 9, 1, 1), (4, 0, 2, 2)]
)
@pytest.mark.parametrize("name", SCALAR)
def test_forward_gradient(name: str, m: int, n: int, a_chunk: int, b_chunk: int, device: Any) -> None:
    monoid, project_fold, plain = SCALAR[name]
    a, b = rand(m, 4, device=device), rand(n, 4, device=device)
    chunks = {"a_chunk": a_chunk, "b_chunk": b_chunk}
    found = mr.map_reduce(monoid, project_fold, a, b, forward_gradient=True, **chunks)
    same(found, [plain(a, b)])
    expected = gradients([plain(a, b)], (a, b)) if n else (torch.zeros_like(a), torch.zeros_like(b))
    same(gradients(found, (a, b)), expected)


@pytest.mark.parametrize("forward_gradient", [False, True])
def test_a_state_that_is_another_leaf(forward_gradient: bool) -> None:
    a, b = rand(3, 2), rand(4, 2)
    other = torch.ones(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(ValueError, match="project_fold"):
        mr.map_reduce(Sum(), lambda x, y: Sum.State(other), a, b, forward_gradient=forward_gradient)


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(1, 13), st.integers(1, 13), st.sampled_from([*SCALAR])
)
def test_forward_gradient_is_that_of_the_backward_pass(
    m: int, n: int, a_chunk: int, b_chunk: int, name: str
) -> None:
    monoid, project_fold, _ = SCALAR[name]
    a, b = rand(m, 3), rand(n, 3)
    chunks = {"a_chunk": a_chunk, "b_chunk": b_chunk}
    found, expected = (
        gradients(mr.map_reduce(monoid, project_fold, a, b, forward_gradient=given, **chunks), (a, b))
        for given in (True, False)
    )
    same(found, expected)


def test_forward_gradient_keeps_a_jacobian_and_visits_nothing_for_a() -> None:
    calls = []

    def project_fold(a: tuple[Tensor, Tensor], b: Tensor) -> LogSumExp.State:
        calls.append(len(b))
        return log_sum(a[0] * a[1][:, None], b)

    a, factor, b = rand(40, 6), rand(40), torch.randn(50, 6, dtype=torch.float64)
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with saved_tensors_hooks(pack, lambda t: t):
        found = mr.map_reduce(
            LogSumExp(), project_fold, (a, factor), b, forward_gradient=True, a_chunk=16, b_chunk=16
        )
    assert sum(sizes.values()) == 8 * (2 * (40 * 6 + 40) + 50 * 6 + 40)  # a and its Jacobian twice
    forward = len(calls)
    assert forward == 3 * 4
    same(
        gradients(found, (a, factor)),
        gradients([((a * factor[:, None]) @ b.T).logsumexp(1)], (a, factor)),
    )
    assert len(calls) == forward


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_forward_gradient_in_a_checkpoint(use_reentrant: bool) -> None:
    a, b = rand(6, 3), rand(7, 3)

    def total(x: Tensor, y: Tensor) -> Tensor:
        return mr.map_reduce(LogSumExp(), log_sum, x, y, forward_gradient=True, a_chunk=4, b_chunk=4).lse

    found = checkpoint(total, a, b, use_reentrant=use_reentrant)
    same(gradients_of_sum(found, (a, b)), gradients_of_sum((a @ b.T).logsumexp(1), (a, b)))


def gradients_of_sum(y: Tensor, leaves: tuple[Tensor, ...]) -> list[Tensor]:
    """By backward(), which a reentrant checkpoint needs."""
    for leaf in leaves:
        leaf.grad = None
    y.sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def test_forward_gradient_with_frozen_inputs() -> None:
    """Nothing is folded for an `a` that needs none, and none without gradients."""
    for frozen in (0, 1):
        tensors = [rand(6, 3), rand(7, 3)]
        tensors[frozen] = tensors[frozen].detach()
        wanted = (tensors[1 - frozen],)
        found = mr.map_reduce(LogSumExp(), log_sum, *tensors, forward_gradient=True, a_chunk=4, b_chunk=4)
        same(gradients(found, wanted), gradients([(tensors[0] @ tensors[1].T).logsumexp(1)], wanted))
    with torch.no_grad():
        found = mr.map_reduce(LogSumExp(), log_sum, rand(6, 3), rand(7, 3), forward_gradient=True)
    assert not found.lse.requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_forward_gradient_of_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    a, b = rand(8, 4, dtype=dtype), rand(600, 4, dtype=dtype)
    found = mr.map_reduce(
        LogSumExp(), lambda x, y: log_sum(x.float(), y.float()), a, b, forward_gradient=True, b_chunk=1
    )
    (gradient,) = gradients(found, (a,))
    assert gradient.dtype == dtype
    exact = a.detach().double().requires_grad_(), b.detach().double()
    (expected,) = gradients([(exact[0] @ exact[1].T).logsumexp(1)], exact[:1])
    torch.testing.assert_close(gradient.double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-3)


def test_forward_gradient_under_torch_func() -> None:
    a, b = torch.randn(3, 5, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)

    def total(x: Tensor, y: Tensor) -> Tensor:
        return mr.map_reduce(
            LogSumExp(), log_sum, x, y, forward_gradient=True, a_chunk=2, b_chunk=4
        ).lse.sum()

    def plain(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T).logsumexp(1).sum()

    same(torch.func.grad(total, (0, 1))(a[0], b), torch.func.grad(plain, (0, 1))(a[0], b))
    of_samples = torch.func.vmap(torch.func.grad(total), (0, None))
    same([of_samples(a, b)], [torch.func.vmap(torch.func.grad(plain), (0, None))(a, b)])


@pytest.mark.parametrize(
    ("monoid", "project_fold"),
    [
        (LogWSum(), lambda a, b: MEAN((a @ b.T).logsumexp(1), (a @ b.T).softmax(1) @ b)),
        (Sum(), lambda a, b: Sum.State((a @ b.T).tanh() @ b)),
        (Max(), lambda a, b: Max().State(*_largest(a @ b.T))),
    ],
)
def test_forward_gradient_needs_a_scalar_state(monoid: Any, project_fold: Any) -> None:
    with pytest.raises(ValueError, match="forward_gradient: expected True only for states of one floating"):
        mr.map_reduce(monoid, project_fold, rand(3, 2), rand(4, 2), forward_gradient=True)


def _largest(scores: Tensor) -> tuple[Tensor, Tensor]:
    best = scores.amax(1)
    return best, (scores == best[:, None]).sum(1)


def test_forward_gradient_refuses_what_project_fold_closes_over() -> None:
    weight = rand(4)
    with pytest.raises(ValueError, match="project_fold: expected a function of a_slice and b_slice alone"):
        mr.map_reduce(
            LogSumExp(), lambda a, b: log_sum(a * weight, b), rand(3, 4), rand(5, 4), forward_gradient=True
        )


# --- fused_backward ---


def attend_backward(
    q: Tensor, kv: tuple[Tensor, Tensor], p: LogWSum.State, g: LogWSum.State
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """The gradients of attention from its result: one product fewer than project_fold and D need."""
    k, v = kv
    weights = (q @ k.T - p.log_weight[:, None]).exp()
    by_score = weights * (g.value @ v.T - (g.value * p.value).sum(1, keepdim=True) + g.log_weight[:, None])
    return by_score @ k, (by_score.T @ q, weights.T @ g.value)


@pytest.mark.parametrize(("m", "n", "a_chunk", "b_chunk"), [(7, 11, 3, 4), (5, 5, 9, 9), (1, 9, 1, 1)])
def test_fused_backward_never_runs_project_fold(
    m: int, n: int, a_chunk: int, b_chunk: int, device: Any
) -> None:
    calls = []

    def project_fold(a: Tensor, b: tuple[Tensor, Tensor]) -> LogWSum.State:
        calls.append(len(a))
        return attend(a, b)

    q, k, v = rand(m, 4, device=device), rand(n, 4, device=device), rand(n, 3, device=device)
    found = mr.map_reduce(
        LogWSum(), project_fold, q, (k, v), fused_backward=attend_backward, a_chunk=a_chunk, b_chunk=b_chunk
    )
    forward = len(calls)
    scores = q @ k.T
    expected = scores.logsumexp(1), scores.softmax(1) @ v
    same(gradients(found, (q, k, v)), gradients(expected, (q, k, v)))
    assert len(calls) == forward


@pytest.mark.parametrize("returned", [None, 3, (torch.zeros(3, 2), torch.zeros(9, 2)), (torch.zeros(3, 2),)])
def test_fused_backward_is_checked(returned: Any) -> None:
    found = mr.map_reduce(LogSumExp(), log_sum, rand(3, 2), rand(4, 2), fused_backward=lambda *_: returned)
    with pytest.raises((TypeError, ValueError), match="fused_backward: expected a"):
        found.lse.sum().backward()


def test_fused_backward_leaves_its_arguments_alone() -> None:
    def wrong(a: Tensor, b: Tensor, p: Any, g: Any) -> tuple[Tensor, Tensor]:
        p.lse.zero_()
        return torch.zeros_like(a), torch.zeros_like(b)

    found = mr.map_reduce(LogSumExp(), log_sum, rand(3, 2), rand(4, 2), fused_backward=wrong)
    with pytest.raises(ValueError, match="fused_backward: expected its arguments left as they are"):
        found.lse.sum().backward()


def test_all_three_together() -> None:
    """Of kept pairs, the forward pass gives the gradient of `a`, and the function the gradient of `b`."""

    def backward(a: Tensor, b: Tensor, p: Any, g: Any) -> tuple[None, Tensor]:
        weights = (a @ b.T - p.lse[:, None]).exp() * g.lse[:, None]
        return None, weights.T @ a

    a, b = rand(12, 3), rand(12, 3)
    found = mr.map_reduce(
        LogSumExp(),
        log_sum,
        a,
        b,
        fused_backward=backward,
        forward_gradient=True,
        pairs=lambda i, j: j.start <= i.start,
        a_chunk=4,
        b_chunk=4,
    )
    mask = block_mask(lambda i, j: j.start <= i.start, 12, 12, 4, 4)
    expected = (a @ b.T).masked_fill(~mask, -math.inf).logsumexp(1)
    same(found, [expected])
    same(gradients(found, (a, b)), gradients([expected], (a, b)))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pairs": 3}, TypeError, r"pairs: expected a function, or a bool tensor \[slices of a, .* got 3"),
        (
            {"pairs": torch.ones(1, 1)},
            TypeError,
            r"pairs: expected a tensor of torch\.bool, or a function, got torch\.float32",
        ),
        (
            {"pairs": torch.ones(3, 4, dtype=torch.bool)},
            ValueError,
            r"pairs: expected shape \[slices of a=1, slices of b=1\], got \[3, 4\]",
        ),
        ({"pairs": lambda i, j: None}, TypeError, "pairs: expected a function that returns True or False"),
        ({"forward_gradient": 1}, TypeError, "forward_gradient: expected True or False, got 1"),
        ({"fused_backward": 1}, TypeError, "fused_backward: expected a function, got 1"),
        (
            {"fused_backward": attend_backward, "project_fold_backward": attend_backward},
            ValueError,
            "fused_backward: expected None beside project_fold_backward",
        ),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        mr.map_reduce(LogSumExp(), log_sum, rand(3, 2), rand(4, 2), **options)
