"""What a traced function may not do: each error names its file, its line and what to write instead."""

from __future__ import annotations

import inspect
import math
import pydoc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

import monoidreduce as mr
from monoidreduce import _C
from monoidreduce.folds.cpu.bytecode import forward_code
from monoidreduce.folds.program.tracing import trace

stat = mr.stat
TABLE, ARRAY = torch.ones(3, 4), numpy.ones(4)


def branch(score):  # type: ignore[no-untyped-def]
    if score > 0:  # here
        return dict(x=stat.total(score))
    return dict(x=stat.total(-score))


def unknown(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(torch.special.i0(score)))  # here


def matrix(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * TABLE))  # here


def reflected(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(TABLE - score))  # here


def by_the_score(score, row, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * TABLE[row, torch.where(score > 0, column, 0)]))  # here


def too_few_indices(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * TABLE[column]))  # here


def real_index(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(TABLE[score, 0]))  # here


def outside(score, column, label):  # type: ignore[no-untyped-def]
    p = stat.softmax(score)
    return dict(nll=p.logsumexp - stat.total(score))  # here


def within(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(torch.exp(stat.total(score))))  # here


def condition(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score > 0))  # here


def number(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.count(score))  # here


def method(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score.cumsum(0)))  # here


def keyword(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(torch.exp(score, out=TABLE)))  # here


def as_number(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(float(score)))  # here


def helper(score: Any) -> Any:
    return torch.cumsum(score, 0)  # here


def through_a_helper(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(helper(score)))


def string(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score + "1"))  # here


def within_an_expression(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(torch.exp(score - stat.softmax(score).logsumexp)))  # here


def of_a_softmax(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.softmax(score).sum(score))  # here


def from_a_list(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * [1.0, 2.0, 3.0, 4.0][column]))  # here


def from_an_array(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * ARRAY[column]))  # here


def an_array(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(ARRAY * score))  # here


def a_slice(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * TABLE[0, column : column + 1]))  # here


def formatted(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(f"{score:.2f}"))  # here


def chained(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.count((score > 0) & (0 < score < 1)))  # here


def negated(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.count(not score > 0))  # here


def of_math(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(math.exp(score)))  # here


def of_numpy(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(numpy.sin(score)))  # here


def vectors(score, row, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score + torch.dot(TABLE[row], TABLE[column, :])))  # here


def a_line(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * TABLE[column].sum()))  # here


def vast(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.count(column < 10**30))  # here


def reduction(score):  # type: ignore[no-untyped-def]
    return dict(x=torch.sum(score))  # here


def reducing_method(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score - score.max()))  # here


def too_few_arguments(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(torch.where(score > 0, score)))  # here


def shifted(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.count((1 << column) > 5))  # here


def shifted_too_far(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.count((column >> 63) > 5))  # here


def shifted_reals(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score << 2))  # here


def of_bits(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.count(score > 1 & column.float()))  # here


def complemented(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.count(~score < -2))  # here


def of_a_helper(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(helper(score, 0)))  # here


CASES = {
    within_an_expression: "a statistic is known when its row is done",
    of_a_softmax: "a softmax has no sum; it has logsumexp, entropy, mean(f) and variance(f)",
    from_a_list: "a list, an array or a slice, indexed by a value that differs from element to element: make",
    from_an_array: "only integers, slices",
    an_array: "expected a number, got many of type ndarray: make it a tensor outside of the function",
    a_slice: "a list, an array or a slice, indexed by a value that differs from element to element: make",
    formatted: "unsupported format string",
    chained: "a branch on a value that differs from element to element: write torch.where(",
    negated: "a branch on a value that differs from element to element: write torch.where(",
    of_math: "math.exp is of plain numbers: write torch.exp",
    of_numpy: "numpy's functions are of numbers and arrays: write torch's",
    vectors: "torch.dot: a function sees single numbers, no vectors. A product of vectors that is added",
    a_line: "sum: a function sees single numbers, no vectors",
    vast: "an integer of more than 64 bits: write a float",
    reduction: "torch.sum has no kernel code, as a function sees one element: over the columns it is mr.",
    reducing_method: "a value of one element has no .max, as a function sees one element: over the columns",
    shifted: "a shift by a number of bits that differs from element to element: write i * powers[n] for i",
    shifted_too_far: "a shift by 63 bits: expected 0 to 62",
    shifted_reals: "<< and >> are of integers",
    of_bits: "&, | and ^ are of conditions and of integers: write comparisons in parentheses",
    complemented: "~ is of a condition or of an integer",
    of_a_helper: "helper() takes 1 positional argument but 2 were given",
    branch: "a branch on a value that differs from element to element: write torch.where(condition, a, b)",
    unknown: "torch.special.i0 has no kernel code; there are: abs, acos",
    matrix: "a tensor of shape [3, 4] inside an element's function: index it with row, column",
    reflected: "a tensor of shape [3, 4] inside an element's function",
    by_the_score: "an index that depends on the score: index by row, column, label, head or batch",
    too_few_indices: "a tensor of shape [3, 4] indexed by 1 of 2 axes",
    real_index: "an index: expected an integer, got a value that is real",
    outside: "a statistic is known when its row is done: use it outside, on what the call returns",
    within: "a statistic is known when its row is done",
    condition: "expected a number, got a condition: write torch.where(condition, 1., 0.)",
    number: "count: expected a condition, got a number",
    method: "a value of one element has no .cumsum; it has abs, absolute, acos",
    keyword: "exp: got an unexpected keyword argument 'out'",
    as_number: "float() of a value that differs from element to element",
    through_a_helper: "torch.cumsum has no kernel code",
    string: "expected a number, got '1' of type str",
}


@pytest.mark.oldest
@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_names_the_line(function: Callable[..., Any]) -> None:
    fold = mr.statistics(function)
    options = (
        {"label": torch.zeros(3, dtype=torch.long)}
        if "label" in inspect.signature(function).parameters
        else {}
    )
    with pytest.raises(mr.TraceError) as caught:
        fold(torch.randn(3, 2), torch.randn(4, 2), **options)
    error = caught.value
    assert isinstance(error, TypeError) and error.file == __file__
    assert error.source.endswith("# here")
    first, source = str(error).split("\n")
    assert first.startswith(f"{__file__}:{error.line}: {CASES[function]}")
    assert source == f"    {error.source}"


def test_what_torch_says_has_a_line() -> None:
    with pytest.raises(mr.TraceError, match=r"where\(\) received an invalid combination") as caught:
        mr.statistics(too_few_arguments)(torch.randn(3, 2), torch.randn(4, 2))
    assert caught.value.file == __file__ and caught.value.source.endswith("# here")


def argument(logits):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(logits))


def nothing(score):  # type: ignore[no-untyped-def]
    return None


def not_a_statistic(score):  # type: ignore[no-untyped-def]
    return dict(x=score)


def a_softmax(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.softmax(score))


def bad_name(score):  # type: ignore[no-untyped-def]
    return {"_x": stat.total(score)}


DEFINITIONS = {
    argument: "argument(logits): arguments are among score, other, row, column, label, head, batch and",
    nothing: "nothing returned NoneType: expected a dict of statistics",
    not_a_statistic: "returned x = a value of one element, of which a row has many: expected mr.stat.total",
    a_softmax: "a_softmax returned x = a softmax: expected its logsumexp or a mean",
    bad_name: "bad_name returned '_x': expected names without a first _",
}


@pytest.mark.parametrize("function", DEFINITIONS, ids=lambda f: f.__name__)
def test_names_the_definition(function: Callable[..., Any]) -> None:
    with pytest.raises(mr.TraceError) as caught:
        mr.statistics(function)(torch.randn(3, 2), torch.randn(4, 2))
    assert caught.value.line == function.__code__.co_firstlineno
    assert DEFINITIONS[function] in str(caught.value)


def test_names_def_below_a_decorator() -> None:
    @mr.statistics
    def decorated(score, unknown):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(score))

    with pytest.raises(mr.TraceError) as caught:
        decorated(torch.randn(3, 2), torch.randn(4, 2))
    assert caught.value.source.startswith("def decorated(score, unknown)")


def short_columns(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * SHORT[column]))


def short_rows(score, row):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * SHORT[row]))


def short_labels(score, label):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * SHORT[label]))


def elsewhere(score, column):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score * META[column]))


SHORT, META = torch.ones(2), torch.ones(4, device="meta")


@pytest.mark.parametrize(
    "function, error, text",
    (
        (short_columns, ValueError, "captured tensor SHORT, of shape [2]: expected 4 along an axis, got 2"),
        (short_rows, ValueError, "captured tensor SHORT, of shape [2]: expected 3 along an axis, got 2"),
        (short_labels, IndexError, "captured tensor SHORT, of shape [2]: index 2 is out of bounds"),
        (elsewhere, ValueError, "captured tensor META, of shape [4]: expected one on cpu as a, got meta"),
    ),
)
def test_captured_tensors(function: Callable[..., Any], error: type[Exception], text: str) -> None:
    """Before any work, where it can be known: a GPU would end the process's use of it."""
    labels = {"label": torch.tensor([0, 2, 1])} if function is short_labels else {}
    with pytest.raises(error) as caught:
        mr.statistics(function)(A, B, **labels)
    assert str(caught.value).startswith(f"{__file__}:{function.__code__.co_firstlineno}: {text}")


def four(score, batch, head, q_idx):  # type: ignore[no-untyped-def]
    return score


@pytest.mark.parametrize(
    "call, text",
    (
        (
            lambda *t: mr.attention(*t, score_mod=four),
            "score_mod: expected a function (score, batch, head, q_idx, kv_idx), got one (score, batch, head",
        ),
        (
            lambda *t: mr.block_mask(lambda q_idx, kv_idx: q_idx >= kv_idx, None, None, 3, 3),
            "mask_mod: expected a function (batch, head, q_idx, kv_idx), got one (q_idx, kv_idx)",
        ),
        (
            lambda *t: mr.attention(*t, mask_mod=lambda q_idx, kv_idx: q_idx >= kv_idx),
            "mask_mod: expected a function (batch, head, q_idx, kv_idx), got one (q_idx, kv_idx)",
        ),
        (
            lambda *t: mr.attend(*t, weight=lambda score, key: score),
            "weight: expected a function of the score, or of arguments among score, batch",
        ),
        (lambda *t: mr.attend(*t, weight=torch.cumsum), "cumsum() missing 1 required positional argument"),
        (
            lambda *t: mr.attention(*t, score_mod=lambda s, *_: stat.total(s)),
            "it returned a statistic: expected a number, the new score",
        ),
    ),
)
def test_functions_of_attention(call: Callable[..., Any], text: str) -> None:
    with pytest.raises(mr.TraceError) as caught:
        call(*torch.randn(3, 1, 2, 3, 4).unbind())
    assert caught.value.file == __file__
    assert f": {text}" in str(caught.value)


@mr.statistics
def plain(score):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score))


@mr.statistics
def with_all(score, other, label, head, t, w):  # type: ignore[no-untyped-def]
    return dict(x=stat.total(score + other + label + head + t + w))


A, B, LABEL = torch.randn(3, 2), torch.randn(4, 2), torch.zeros(3, dtype=torch.long)
ROW, COLUMN = {"t": torch.zeros(3)}, {"w": torch.zeros(4)}
ALL = {"other_a": A, "other_b": B, "label": LABEL, "row": ROW, "column": COLUMN}


@pytest.mark.parametrize(
    "call, error, text",
    (
        (lambda: plain(A, torch.randn(4, 5)), ValueError, "b: expected shape [V, D=2] as a is [3, 2], got"),
        (
            lambda: plain(A.long(), B),
            TypeError,
            "a: expected float64, float32, bfloat16 or float16, got torch.int64",
        ),
        (lambda: plain(A, B, A, B), ValueError, "other_a, other_b: expected none: no argument is other"),
        (
            lambda: plain(A, B, label=LABEL),
            ValueError,
            "label: expected none: no argument is label, got a tensor",
        ),
        (
            lambda: plain(A, B, row=ROW),
            ValueError,
            "row: expected names of arguments (there are none), once, got 't'",
        ),
        (lambda: plain(A, B, scale=float("inf")), ValueError, "scale: expected a finite number, got inf"),
        (lambda: plain(A, B, softcap=1.0), TypeError, "plain() got an unexpected keyword argument 'softcap'"),
        (
            lambda: with_all(A, B),
            ValueError,
            "other_a, other_b: expected two tensors, for the argument other",
        ),
        (
            lambda: with_all(A, B, **{**ALL, "label": None}),
            ValueError,
            "label: expected a tensor, for the argument",
        ),
        (
            lambda: with_all(A, B, **{**ALL, "label": LABEL.float()}),
            TypeError,
            "label: expected an integer dtype",
        ),
        (lambda: with_all(A, B, **{**ALL, "label": LABEL[:2]}), ValueError, "label: expected shape [3]"),
        (
            lambda: with_all(A, B, **{**ALL, "row": {"t": torch.zeros(4)}}),
            ValueError,
            "row['t']: expected shape [3]",
        ),
        (
            lambda: with_all(A, B, **{**ALL, "column": {"w": 1.0}}),
            TypeError,
            "column['w']: expected a tensor, got 1.0",
        ),
        (
            lambda: mr.statistics(lambda score, w: dict(x=stat.total(w)))(A, B),
            mr.TraceError,
            "and the names of the data in row= and column=; w is not",
        ),
        (
            lambda: with_all(A, B, **ALL),
            ValueError,
            "a: expected shape [batch, heads, rows, D], for the arguments",
        ),
        (lambda: mr.statistics(3), TypeError, "function: expected a Python function, got 3"),  # type: ignore[arg-type]
        (lambda: stat.total(A), TypeError, "mr.stat.total is for functions decorated with mr.statistics"),
    ),
)
def test_arguments_of_a_call(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


def test_programs_that_nobody_wrote() -> None:
    """A text is checked before it is run: an exported program may be edited."""
    program = torch.ops.monoidreduce.statistics.default
    for text in (
        "",
        "[]",
        '[[["add",0,1]],[],[0],[],[]]',
        '[[["score"],["exp",1]],[],[1],[],[]]',
        '[[["os"]],[],[0],[],[]]',
        '[[["score"]],[[0]],[],[],[],[[1,0]],[]]',
        '[[["score"]],[],[],[],[],[[-1,1]],[]]',
        '[[["score"]],[],[],[],[],[],["a"]]',
        '[[["score"]],[[0]],[],[],[],[],[],[0,"a"],[],[]]',
    ):
        with pytest.raises(ValueError, match="program: expected a text that monoidreduce wrote"):
            program(A, B, *[None] * 9, text, [], 1, [], 1.0, None)


def product(factors: int) -> Callable[..., Any]:
    def of(score: Any) -> Any:
        result = score
        for i in range(factors):
            result = result * torch.tanh(score * (i + 0.5))
        return dict(x=stat.total(result))

    return of


@pytest.mark.parametrize("factors", (16, 40))
def test_long_products_have_gradients(factors: int) -> None:
    a, b = (torch.rand(n, 1, dtype=torch.float64) + 2 for n in (3, 4))
    a.requires_grad_()
    fold = mr.statistics(product(factors))
    found, expected = (torch.autograd.grad(of(a, b).x.sum(), a)[0] for of in (fold, fold.reference))
    torch.testing.assert_close(found, expected)


def test_captured_coordinates_of_any_number_have_gradients() -> None:
    captured = [torch.rand(3, dtype=torch.float64, requires_grad=True) for _ in range(40)]

    @mr.statistics
    def fold(score, row):  # type: ignore[no-untyped-def]
        return dict(x=stat.total(sum(torch.tanh(score * w[row]) for w in captured)))

    a, b = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)
    found, expected = (torch.autograd.grad(of(a, b).x.sum(), captured) for of in (fold, fold.reference))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("function", "limit"),
    (
        (
            product(200),
            "of, which returns x: its gradient has more values at a time than the 128 that the CPU engine",
        ),
        (
            lambda score: {f"n{i}": stat.total(score * i) for i in range(40)},
            "n38, n39: the statistics have 40 numbers of a row, more than 32: write two functions",
        ),
    ),
)
def test_what_does_not_fit_is_refused_before_the_forward_pass(
    function: Callable[..., Any], limit: str
) -> None:
    """Also what the backward pass alone has no room for, if it may come."""
    fold = mr.statistics(function)
    with pytest.raises(mr.TraceError, match="write two functions") as caught:
        fold(A.clone().requires_grad_(), B)
    assert limit in str(caught.value) and caught.value.line == function.__code__.co_firstlineno
    if len(caught.value.reason) < 150:
        fold(A, B)  # without a gradient it fits


def test_a_third_score_is_refused() -> None:
    with pytest.raises(TypeError, match="operands: expected a, b and at most other_a, other_b"):
        with_all(A, B, A, B, A, B)


def test_what_editors_show() -> None:
    """The arguments of a call, the function's own words, and no foreign names."""
    names = [*inspect.signature(plain).parameters]
    assert (
        names[:5] == ["a", "b", "other_a", "other_b", "label"]
        and "others" not in names
        and "self" not in names
    )
    shown = pydoc.render_doc(documented, renderer=pydoc.plaintext)
    assert "documented(a: " in shown and "Of the author." in shown and "Args:" in shown
    assert "class Statistics" not in shown

    class Holder:
        fold = plain

    assert Holder().fold is plain and Holder.fold is plain
    for public in (stat, mr.distributed, mr.monoids, mr.nn):
        assert [name for name in dir(public) if name[0] != "_"] == sorted(public.__all__)
    assert {name for name in dir(mr) if name[0] != "_"} == set(mr.__all__) - {"__version__"}


@mr.statistics
def documented(score):  # type: ignore[no-untyped-def]
    """Of the author."""
    return dict(x=stat.total(score))


def test_code_that_nobody_wrote() -> None:
    """The engine's code is checked too: no number of it makes the engine leave its memory."""
    traced = trace(
        lambda score, column: dict(x=stat.softmax(score * 2.0).mean(score), y=stat.largest(score)), {}, {}
    )
    code = forward_code(traced.text, 0, 0, 0, 0).split()
    results = torch.empty(3, 3), torch.empty(1, 3), torch.empty(1, 3, dtype=torch.long)
    refused = 0
    for at in range(len(code)):
        for number in ("-1", "0", "1", "127", "128", "639", "640", "1000000000000"):
            changed = " ".join([*code[:at], number, *code[at + 1 :]])
            try:
                _C.statistics_forward(A, B, *[None] * 8, *results, changed, 1.0, 1, 0)
            except ValueError as error:
                assert str(error) == "program: expected the code of this version of monoidreduce"
                refused += 1
    assert refused > len(code)
