"""Functions of a user's under torch.compile: a graph serves the calls whose function does the same."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import monoidreduce as mr
from monoidreduce import stat

F64 = torch.float64
HEADS, LENGTH, WIDTH = 2, 9, 4


@pytest.fixture(autouse=True)
def no_graphs_of_earlier_tests() -> Iterator[None]:
    torch.compiler.reset()
    torch.manual_seed(0)
    yield


def operand() -> Tensor:
    return torch.randn(1, HEADS, LENGTH, WIDTH, dtype=F64, requires_grad=True)


def dense(q: Tensor, score_mod: Any = None, mask_mod: Any = None) -> Tensor:
    """Attention of q to itself with all scores, whose functions see them all at once."""
    batch, head, query, key = (
        torch.arange(n).view([-1 if axis == k else 1 for k in range(4)])
        for axis, n in enumerate((len(q), HEADS, q.shape[2], q.shape[2]))
    )
    scores = q @ q.mT / WIDTH**0.5
    if score_mod is not None:
        scores = score_mod(scores, batch, head, query, key)
    if mask_mod is not None:
        scores = torch.where(mask_mod(batch, head, query, key), scores, -torch.inf)
    return scores.softmax(-1) @ q


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, **{"fullgraph": True, "backend": "aot_eager", **options})


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def assert_same(found: Tensor, expected: Tensor, *leaves: Tensor) -> None:
    torch.testing.assert_close(found, expected)
    of = [torch.autograd.grad(out.sin().sum(), leaves) for out in (found, expected)] if leaves else []
    for ours, theirs in zip(*of, strict=True) if of else ():
        torch.testing.assert_close(ours, theirs)


def window(size: int) -> Callable[..., Any]:
    return lambda b, h, i, j: (i - j).abs() <= size


def alibi(slopes: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, i, j: s + slopes[h] * (j - i)


def both(*masks: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *at: masks[0](*at) & masks[1](*at)


def near(size: int, b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i - j).abs() <= size


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


class Window:
    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() <= self.size


MASKS: dict[str, tuple[Callable[[int], Any], int]] = {  # and how many graphs serve any number of sizes
    "closure": (window, 2),
    "closure of functions": (lambda size: both(causal, window(size)), 2),
    "partial": (lambda size: functools.partial(near, size), 2),
    "default": (lambda size: lambda b, h, i, j, to=size: (i - j).abs() <= to, 3),
    "object": (Window, 3),
    "method": (lambda size: Window(size).__call__, 3),
}


@pytest.mark.oldest
@pytest.mark.parametrize("name", MASKS)
def test_another_function_of_the_same_code(name: str) -> None:
    make, most = MASKS[name]
    q = operand()
    call = compiled(lambda q, mask: mr.attention(q, q, q, mask_mod=mask))
    before = graphs()
    for size in (2, 5, 0, 2):
        assert_same(call(q, make(size)), dense(q, mask_mod=make(size)), q)
    assert graphs() - before <= most


@pytest.mark.oldest
def test_numbers_of_the_compiled_function_are_inputs() -> None:
    """More of them than graphs that torch makes of a function."""
    q = operand()

    def call(q: Tensor, size: int, slope: float) -> Tensor:
        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slope * (i - j).abs()

        return mr.attention(q, q, q, score_mod=score, mask_mod=lambda b, h, i, j: (i - j).abs() <= size)

    step, before = compiled(call), graphs()
    for size in range(1, 13):
        slope = size / 7
        expected = dense(q, lambda s, b, h, i, j, by=slope: s - by * (i - j).abs(), window(size))
        assert_same(step(q, size, slope), expected, q)
    assert graphs() - before <= 3


@pytest.mark.oldest
@pytest.mark.parametrize("where", ["argument", "local", "default", "function", "sourced"])
def test_captured_tensors_are_inputs_with_gradients(where: str) -> None:
    def call(q: Tensor, slopes: Tensor, given: Any) -> Tensor:
        doubled = slopes * 2
        mods: dict[str, Any] = {
            "argument": lambda s, b, h, i, j: s + slopes[h] * (j - i),
            "local": lambda s, b, h, i, j: s + doubled[h] * (j - i),
            "default": lambda s, b, h, i, j, of=doubled: s + of[h] * (j - i),
            "function": lambda s, b, h, i, j: given(s, b, h, i, j) * slopes[h],
            "sourced": given,
        }
        return mr.attention(q, q, q, score_mod=mods[where])

    step, before = compiled(call), graphs()
    for _ in range(3):
        q, slopes, other = operand(), *(torch.rand(HEADS, dtype=F64, requires_grad=True) for _ in range(2))
        mods: dict[str, Any] = {
            "argument": alibi(slopes),
            "local": alibi(slopes * 2),
            "default": alibi(slopes * 2),
            "function": lambda s, b, h, i, j: alibi(other)(s, b, h, i, j) * slopes[h],  # noqa: B023
            "sourced": alibi(other),
        }
        leaves = {"function": (q, slopes, other), "sourced": (q, other)}.get(where, (q, slopes))
        assert_same(step(q, slopes, alibi(other)), dense(q, mods[where]), *leaves)
    assert graphs() - before == 1


class Layer(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.slopes = size, nn.Parameter(torch.rand(HEADS, dtype=F64))
        self.register_buffer("places", torch.rand(LENGTH, dtype=F64))

    def mask(self, b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() <= self.size

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.slopes[h] * (j - i) + self.places[j]

    def forward(self, q: Tensor) -> Tensor:
        return mr.attention(q, q, q, score_mod=self.score, mask_mod=self.mask)


class WithLambdas(Layer):
    def forward(self, q: Tensor) -> Tensor:
        score = lambda s, b, h, i, j: s + self.slopes[h] * (j - i) + self.places[j]  # noqa: E731
        return mr.attention(q, q, q, score_mod=score, mask_mod=lambda b, h, i, j: (i - j).abs() <= self.size)


class WithModule(Layer):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.attention = mr.nn.Attention(score_mod=alibi(self.slopes), mask_mod=window(size))

    def score(self, s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + self.slopes[h] * (j - i)

    def forward(self, q: Tensor) -> Tensor:
        out: Tensor = self.attention(q, q, q)
        return out


@pytest.mark.parametrize("kind", [Layer, WithLambdas, WithModule])
@pytest.mark.parametrize("by_layer", [False, True])
def test_layers_with_a_window_each(kind: type[Layer], by_layer: bool) -> None:
    """A whole model, and `layer.compile()` of each layer."""
    layers = nn.ModuleList(kind(size) for size in (1, 4, 2))
    model = nn.Sequential(*layers)
    if by_layer:
        for layer in layers:
            layer.compile(backend="aot_eager", fullgraph=True)
    step = model if by_layer else compiled(model)
    q = operand()
    for _ in range(2):
        expected = q
        for layer in layers:
            expected = dense(expected, layer.score, layer.mask)
        assert_same(step(q), expected, q, *(layer.slopes for layer in layers))
        layers[1].size += 1 if kind is not WithModule else 0


SIZE = 1
TABLE = torch.rand(HEADS, dtype=F64)


def by_globals(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return torch.where((i - j).abs() <= SIZE, s + TABLE[h] * j, s)


def by_a_helper(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
    return by_globals(s, b, h, i, j) * 2


@pytest.mark.parametrize("mod", [by_globals, by_a_helper, lambda s, *at: by_a_helper(s, *at) + 1])
def test_globals_that_change(mod: Any) -> None:
    global SIZE, TABLE
    q = operand()
    step = compiled(lambda q: mr.attention(q, q, q, score_mod=mod))
    for size in (1, 3, 1):
        SIZE, TABLE = size, torch.rand(HEADS, dtype=F64)
        assert_same(step(q), dense(q, mod), q)


def test_a_variable_of_the_closure_that_changes() -> None:
    q, size = operand(), 1

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i - j).abs() <= size

    step = compiled(lambda q: mr.attention(q, q, q, mask_mod=mask))
    for n in (1, 3, 5, 3):
        size = n
        assert_same(step(q), dense(q, mask_mod=window(n)), q)


def test_a_number_that_the_structure_depends_on() -> None:
    q = operand()

    def strided(n: int) -> Any:
        return lambda b, h, i, j: (i - j) % (2 if n > 2 else 3) == 0

    step = compiled(lambda q, n: mr.attention(q, q, q, mask_mod=lambda b, h, i, j: strided(n)(b, h, i, j)))
    for n in (1, 2, 3, 4):
        assert_same(step(q, n), dense(q, mask_mod=strided(n)), q)


@pytest.mark.parametrize("what", ["variable", "attribute"])
def test_what_the_compiled_function_changes_itself(what: str) -> None:
    """An object that it has changed is read outside of the graph."""
    held = Window(1)

    def call(q: Tensor, size: int) -> Tensor:
        now = 1
        mask = (lambda b, h, i, j: (i - j).abs() <= now) if what == "variable" else held
        now = held.size = size
        return mr.attention(q, q, q, mask_mod=mask)

    q, step = operand(), compiled(call, fullgraph=what == "variable")
    for size in (3, 1, 5):
        assert_same(step(q, size), dense(q, mask_mod=window(size)), q)


def by_a_result(of: Tensor) -> Any:
    return lambda s, b, h, i, j: s + of.exp()[h] * j


def test_a_function_that_computes_a_tensor_breaks_the_graph_and_says_so() -> None:
    def call(q: Tensor, slopes: Tensor) -> Tensor:
        return mr.attention(q, q, q, score_mod=by_a_result(slopes)) * 2

    step = compiled(call, fullgraph=False)
    for _ in range(2):
        q, slopes = operand(), torch.rand(HEADS, dtype=F64)
        assert_same(step(q, slopes), dense(q, by_a_result(slopes)) * 2, q)
    torch.compiler.reset()
    place = rf"{__file__}:{by_a_result.__code__.co_firstlineno + 1}: the function computes a tensor"
    with pytest.raises(torch._dynamo.exc.Unsupported, match=place):
        compiled(call)(q, slopes)


def test_an_error_of_the_function_is_the_one_of_an_eager_call() -> None:
    q = operand()
    mask = lambda b, h, i, j: q  # noqa: E731
    with pytest.raises(Exception, match="a tensor of shape"):
        compiled(lambda q: mr.attention(q, q, q, mask_mod=mask), fullgraph=False)(q)


@pytest.mark.parametrize("normalized", [False, True])
def test_weights_of_attend(normalized: bool) -> None:
    q, sharpness = operand(), torch.rand(HEADS, dtype=F64)

    def call(q: Tensor, shift: float, power: Tensor) -> Tensor:
        weight = lambda s: torch.sigmoid(s - shift) * power  # noqa: E731
        return mr.attend(q, q, q, weight=weight, normalized=normalized)

    step = compiled(call)
    for shift in (0.5, 1.5, 2.5):
        power = torch.rand((), dtype=F64, requires_grad=True)
        weights = torch.sigmoid(q @ q.mT / WIDTH**0.5 - shift) * power
        expected = weights @ q / (weights.sum(-1, keepdim=True) if normalized else 1)
        leaves = (q,) if normalized else (q, power)
        assert_same(step(q, shift, power), expected, *leaves)
    assert len(sharpness) == HEADS


def test_masks_of_blocks_are_inputs() -> None:
    q = operand()
    step, before = compiled(lambda q, blocks: mr.attention(q, q, q, block_mask=blocks)), graphs()
    for size in (1, 2, 3, 5):
        blocks = mr.block_mask(window(size), None, None, LENGTH, LENGTH, block_size=4)
        assert_same(step(q, blocks), dense(q, mask_mod=window(size)), q)
    assert graphs() - before <= 2


def test_a_mask_of_blocks_is_made_in_the_compiled_function() -> None:
    def call(q: Tensor, size: int) -> Tensor:
        blocks = mr.block_mask(window(size), None, None, LENGTH, LENGTH, block_size=4)
        return mr.attention(q, q, q, block_mask=blocks)

    q, step = operand(), compiled(call, fullgraph=False)
    for size in (1, 3):
        assert_same(step(q, size), dense(q, mask_mod=window(size)), q)


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_one_graph_for_all_sizes(made: str) -> None:
    """Of a built-in bias, with a window and a table whose length is that of the keys."""
    outside = both(causal, window(3))

    def call(q: Tensor, places: Tensor, size: int) -> Tensor:
        mask = outside if made == "outside" else lambda b, h, i, j: (i >= j) & (i - j <= size)
        return mr.attention(q, q, q, mask_mod=mask, score_mod=lambda s, b, h, i, j: s + places[j])

    step = compiled(call, dynamic=True)
    for length in (9, 5, 12):
        q = torch.randn(1, HEADS, length, WIDTH, dtype=F64, requires_grad=True)
        places = torch.randn(length, dtype=F64, requires_grad=True)
        with torch._dynamo.config.patch(error_on_recompile=length != 9):
            found = step(q, places, 3)
        assert_same(
            found, dense(q, lambda s, b, h, i, j, of=places: s + of[j], both(causal, window(3))), q, places
        )


def test_vmap_in_a_graph() -> None:
    q = torch.randn(3, 1, HEADS, LENGTH, WIDTH, dtype=F64)
    mask = window(2)
    step = compiled(torch.vmap(lambda q: mr.attention(q, q, q, mask_mod=mask)), fullgraph=False)
    torch.testing.assert_close(step(q), torch.stack([dense(of, mask_mod=mask) for of in q]))


class WithStatistic(nn.Module):
    def __init__(self, power: int) -> None:
        super().__init__()
        self.power, self.bias = power, nn.Parameter(torch.rand(7, dtype=F64))
        self.fold = mr.statistics(
            lambda score, column: {"x": stat.total(score**self.power + self.bias[column])}
        )

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x: Tensor = self.fold(a, b).x
        return x


def test_a_statistic_reads_its_module() -> None:
    a, b = torch.randn(5, 3, dtype=F64), torch.randn(7, 3, dtype=F64)
    modules = [WithStatistic(power) for power in (1, 2, 3)]
    step = compiled(lambda module, a, b: module(a, b))
    for module in (*modules, *modules):
        expected = ((a @ b.T) ** module.power + module.bias).sum(1)
        assert_same(step(module, a, b), expected, module.bias)


def test_a_statistic_over_variables_of_the_compiled_function() -> None:
    def call(a: Tensor, b: Tensor, bias: Tensor, power: float) -> Tensor:
        fold = mr.statistics(lambda score, column: {"x": stat.total(score * power + bias[column])})
        x: Tensor = fold(a, b).x
        return x

    a, b = torch.randn(5, 3, dtype=F64, requires_grad=True), torch.randn(7, 3, dtype=F64)
    step = compiled(call, fullgraph=False)
    for power in (0.5, 1.5, 2.5):
        bias = torch.rand(7, dtype=F64, requires_grad=True)
        assert_same(step(a, b, bias, power), (a @ b.T * power + bias).sum(1), a, bias)
