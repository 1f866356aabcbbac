"""The folds of examples/gallery beside dense torch in float64: values and gradients, by the acceptance rule.

In float32 and bfloat16 the base of the rule is the same function with all scores stored, by
`Statistics.reference`.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tolerance import (
    accuracy_failures,
    as_outputs,
    check_draws,
    one_thread,
    raise_failures,
    run,
    upstream_gradient,
)
from torch import Tensor

from monoidreduce.folds.program import streams
from monoidreduce.folds.statistics import Statistics

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "examples/gallery"
F64 = torch.float64

Inputs = dict[str, Tensor]
# name -> (inputs of N rows, M columns and width D in float64, the same in dense torch)
ENTRIES: dict[str, tuple[Callable[[int, int, int], Inputs], Callable[..., Any]]] = {}


def entry(inputs: Callable[[int, int, int], Inputs]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for the reference of the gallery's function of the same name."""

    def add(reference: Callable[..., Any]) -> Callable[..., Any]:
        ENTRIES[reference.__name__] = inputs, reference
        return reference

    return add


def normal(*sizes: int, spread: float = 1.0) -> Tensor:
    return spread * torch.randn(sizes, dtype=F64)


def unit(*sizes: int) -> Tensor:
    return F.normalize(normal(*sizes), dim=-1)


# Heads over a vocabulary.


def tokens(n: int, m: int, d: int) -> Inputs:
    return {**two_heads(n, m, d), "token": torch.randint(m, (n,))}


def two_heads(n: int, m: int, d: int) -> Inputs:
    return {"hidden": normal(n, d, spread=0.5), "head": normal(m, d)}


def log_probs(hidden: Tensor, head: Tensor) -> Tensor:
    return (hidden @ head.mT).log_softmax(-1)


def of_target(values: Tensor, token: Tensor) -> Tensor:
    return values.gather(-1, token[..., None])[..., 0]


@entry(tokens)
def smoothed(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    logits = hidden @ head.T
    loss = F.cross_entropy(logits, token, reduction="none", label_smoothing=0.1)
    return loss + 1e-4 * logits.logsumexp(1) ** 2


@entry(tokens)
def focal(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    p = of_target((hidden @ head.T).softmax(1), token)
    return -((1 - p) ** 2) * p.log()


@entry(tokens)
def hinge(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    logits = hidden @ head.T
    others = logits.scatter(1, token[:, None], -math.inf)
    return torch.relu(1 + others.max(1).values - of_target(logits, token))


@entry(lambda n, m, d: {**tokens(n, m, d), "prior": normal(m).softmax(0)})
def logit_adjusted(hidden: Tensor, head: Tensor, token: Tensor, prior: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ head.T + prior.log(), token, reduction="none")


@entry(lambda n, m, d: {**tokens(n, m, d), "hidden": normal(n, 3, d), "log_mix": normal(n, 3).log_softmax(1)})
def mixture_of_softmaxes(hidden: Tensor, head: Tensor, token: Tensor, log_mix: Tensor) -> Tensor:
    p = (log_mix.exp()[..., None] * (hidden @ head.T).softmax(2)).sum(1)
    return -of_target(p, token).log()


@entry(tokens)
def calibration_error(hidden: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    p = (hidden @ head.T).softmax(1)
    confidence, best = p.max(1)
    total = p.new_zeros(())
    for i in range(15):
        of_bin = (confidence >= i / 15) & ((confidence < (i + 1) / 15) | (i == 14))
        total = total + (confidence - (best == token).to(p))[of_bin].sum().abs()
    return total / len(token), torch.special.entr(p).sum(1).mean()


@entry(tokens)
def brier(hidden: Tensor, head: Tensor, token: Tensor) -> Tensor:
    p = (hidden @ head.T).softmax(1)
    return (p - F.one_hot(token, len(head))).square().sum(1)


@entry(tokens)
def ranks(hidden: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.T
    target = of_target(logits, token)[:, None]
    soft = torch.sigmoid((logits - target) / 0.1).sum(1) + 0.5
    return (logits.argsort(1, descending=True) == token[:, None]).long().argmax(1) + 1, soft


@entry(lambda n, m, d: {**two_heads(n, m, d), "seed": torch.tensor(7)})
def sample(hidden: Tensor, head: Tensor, seed: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = (torch.arange(len(t), device=seed.device) for t in (hidden, head))
    number = streams.uniform(streams.stream(seed, torch.zeros_like(seed)), rows[:, None], columns)
    logits = hidden @ head.T
    index = (logits - (-number.to(logits).log()).log()).argmax(1)
    return index, of_target(logits.log_softmax(1), index)


def preferences(n: int, m: int, d: int) -> Inputs:
    token = torch.randint(m, (2, n, 5))
    token[:, :, 3:] = torch.where(torch.rand(2, n, 2) < 0.5, -100, token[:, :, 3:])
    inputs = {"hidden": normal(2, n, 5, d), "head": normal(m, d)}
    return {**inputs, "ref_hidden": normal(2, n, 5, d + 2), "ref_head": normal(m, d + 2), "token": token}


@entry(preferences)
def dpo(hidden: Tensor, head: Tensor, ref_hidden: Tensor, ref_head: Tensor, token: Tensor) -> Tensor:
    ratio = log_probs(hidden, head) - log_probs(ref_hidden, ref_head)
    ratio = torch.where(token < 0, 0.0, of_target(ratio, token.clamp(min=0))).sum(-1)
    return -(0.1 * (ratio[0] - ratio[1])).sigmoid().log()


@entry(
    lambda n, m, d: {
        **two_heads(n, m, d),
        "teacher_hidden": normal(n, d + 3),
        "teacher_head": normal(m, d + 3),
    }
)
def distillation(hidden: Tensor, head: Tensor, teacher_hidden: Tensor, teacher_head: Tensor) -> Tensor:
    p, q = log_probs(hidden / 2, head), log_probs(teacher_hidden / 2, teacher_head)
    return 4 * F.kl_div(p, q, reduction="none", log_target=True).sum(1)


@entry(
    lambda n, m, d: {**two_heads(n, m, d), "other_hidden": normal(n, d + 3), "other_head": normal(m, d + 3)}
)
def jensen_shannon(hidden: Tensor, head: Tensor, other_hidden: Tensor, other_head: Tensor) -> Tensor:
    p, q = (hidden @ head.T).softmax(1), (other_hidden @ other_head.T).softmax(1)
    entr = torch.special.entr
    return entr((p + q) / 2).sum(1) - (entr(p) + entr(q)).sum(1) / 2


def stored_tokens(n: int, m: int, d: int) -> Inputs:
    value = torch.randint(max(m // 3, 1), (m,))
    return {
        "hidden": normal(n, d),
        "stored": normal(m, d),
        "value": value,
        "token": value[torch.randint(m, (n,))],
    }


@entry(stored_tokens)
def nearest_tokens(hidden: Tensor, stored: Tensor, value: Tensor, token: Tensor) -> Tensor:
    p = (-(hidden[:, None] - stored).square().sum(2)).softmax(1)
    return (p * (value == token[:, None])).sum(1).log()


# Members of a batch: square, so the number of columns is not used.


def pairs(n: int, m: int, d: int) -> Inputs:
    return {"x": unit(n, d), "y": unit(n, d)}


def classes(n: int, m: int, d: int) -> Inputs:
    return {"x": unit(n, d), "kind": torch.arange(n) % max(n // 4, 1)}


def same(kind: Tensor) -> tuple[Tensor, Tensor]:
    """[N, N]: of one class; and the same without the diagonal."""
    together = kind[:, None] == kind
    return together, together & ~torch.eye(len(kind), dtype=torch.bool, device=kind.device)


def all_squares(x: Tensor, y: Tensor) -> Tensor:
    return (x[:, None] - y).square().sum(2)


@entry(lambda n, m, d: {"image": unit(n, d), "text": unit(n, d), "scale": torch.tensor(9.0, dtype=F64)})
def clip(image: Tensor, text: Tensor, scale: Tensor) -> Tensor:
    logits, target = scale * image @ text.T, torch.arange(len(image), device=image.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


@entry(lambda n, m, d: {**ENTRIES["clip"][0](n, m, d), "bias": torch.tensor(-5.0, dtype=F64)})
def siglip(image: Tensor, text: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    logits = scale * image @ text.T + bias
    sign = 2 * torch.eye(len(image), dtype=logits.dtype, device=logits.device) - 1
    return -F.logsigmoid(sign * logits).sum() / len(image)


@entry(classes)
def supcon(x: Tensor, kind: Tensor) -> Tensor:
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    log_p = (x @ x.T / 0.1).masked_fill(~others, -math.inf).log_softmax(1)
    _, positive = same(kind)
    of_row = [-log_p[i][positive[i]].mean() for i in range(len(x)) if positive[i].any()]
    return torch.stack(of_row).mean()


@entry(pairs)
def hard_negatives(x: Tensor, y: Tensor) -> Tensor:
    n, score = len(x), x @ y.T / 0.5
    others = ~torch.eye(n, dtype=torch.bool, device=x.device)
    of_others = score[others].view(n, n - 1)
    importance = of_others.exp() / of_others.exp().mean(1, keepdim=True)
    negatives, match = (importance * of_others.exp()).sum(1), score.diag().exp()
    return -(match / (match + negatives)).log().mean()


@entry(pairs)
def alignment_and_uniformity(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    spread = (-2 * all_squares(x, x)[others]).exp().mean().log()
    return (x - y).square().sum(1).mean(), spread


def queries_and_documents(n: int, m: int, d: int) -> Inputs:
    keep = torch.rand(3, m) < 0.7
    keep[:, 0] = True
    return {"queries": unit(n, 6, d), "documents": unit(3, m, d), "keep": keep}


@entry(queries_and_documents)
def max_sim(queries: Tensor, documents: Tensor, keep: Tensor) -> Tensor:
    score = torch.einsum("qtd,pld->pqtl", queries, documents)
    return score.masked_fill(~keep[:, None, None], -math.inf).max(3).values.sum(2)


@entry(classes)
def triplet(x: Tensor, kind: Tensor) -> Tensor:
    square, (together, _) = all_squares(x, x), same(kind)
    far = square.masked_fill(~together, -math.inf).max(1).values
    return torch.relu(0.2 + far - square.masked_fill(together, math.inf).min(1).values)


@entry(classes)
def multi_similarity(x: Tensor, kind: Tensor) -> Tensor:
    score, (together, positive) = x @ x.T, same(kind)
    near = torch.where(positive, (-2 * (score - 0.5)).exp(), 0.0).sum(1)
    far = torch.where(together, 0.0, (50 * (score - 0.5)).exp()).sum(1)
    return near.log1p() / 2 + far.log1p() / 50


@entry(classes)
def circle(x: Tensor, kind: Tensor) -> Tensor:
    score, (together, positive) = x @ x.T, same(kind)
    to_near, to_far = (1.25 - score).relu().detach(), (score + 0.25).relu().detach()
    near = (-80 * to_near * (score - 0.75)).masked_fill(~positive, -math.inf).logsumexp(1)
    far = (80 * to_far * (score - 0.25)).masked_fill(together, -math.inf).logsumexp(1)
    return F.softplus(near + far)


@entry(classes)
def nca(x: Tensor, kind: Tensor) -> Tensor:
    others = ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    p = (-all_squares(x, x)).masked_fill(~others, -math.inf).softmax(1)
    return (p * same(kind)[1]).sum(1).log()


# Points.


def clouds(n: int, m: int, d: int) -> Inputs:
    return {"x": normal(n, d), "y": 0.3 + normal(m, d)}


def gaussian(x: Tensor, y: Tensor) -> Tensor:
    return (-0.5 * all_squares(x, y)).exp()


def roots(square: Tensor) -> Tensor:
    """Distances, with a gradient of 0 where they are 0."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


@entry(lambda n, m, d: {"x": normal(n, d), "sample": 0.3 + normal(m, d)})
def log_density(x: Tensor, sample: Tensor) -> Tensor:
    kernels = torch.distributions.Normal(sample, 1.0).log_prob(x[:, None]).sum(2)
    return kernels.logsumexp(1) - math.log(len(sample))


@entry(clouds)
def mean_shift(x: Tensor, y: Tensor) -> Tensor:
    return (-0.5 * all_squares(x, y)).softmax(1) @ y


@entry(lambda n, m, d: {"x": normal(n, d), "known": normal(m, d), "value": normal(m, 3)})
def regression(x: Tensor, known: Tensor, value: Tensor) -> Tensor:
    return (-0.5 * all_squares(x, known)).softmax(1) @ value


@entry(lambda n, m, d: {"x": normal(n, d), "target": normal(n, 2)})
def ridge(x: Tensor, target: Tensor) -> Tensor:
    kernel = (-roots(all_squares(x, x))).exp()
    return torch.linalg.solve(kernel + 0.1 * torch.eye(len(x), dtype=x.dtype, device=x.device), target)


def mixture(n: int, m: int, d: int) -> Inputs:
    inputs = {"log_weight": normal(m).log_softmax(0), "mean": normal(m, d)}
    return {"x": normal(n, d), **inputs, "log_width": normal(m, d, spread=0.3)}


@entry(mixture)
def gaussian_mixture(x: Tensor, log_weight: Tensor, mean: Tensor, log_width: Tensor) -> tuple[Tensor, Tensor]:
    of = torch.distributions.Normal(mean, log_width.exp()).log_prob(x[:, None]).sum(2) + log_weight
    return of.logsumexp(1), of.argmax(1)


@entry(lambda n, m, d: {"x": normal(n, d), "code": normal(m, d)})
def quantize(x: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    found = all_squares(x, code).min(1)
    return found.values, found.indices


@entry(lambda n, m, d: {"x": normal(n, d), "known": normal(m + 7, d), "value": normal(m + 7, 2)})
def neighbours(x: Tensor, known: Tensor, value: Tensor) -> Tensor:
    near = all_squares(x, known).topk(8, 1, largest=False)
    weight = 1 / (near.values + 1e-6)
    return torch.einsum("nk,nke->ne", weight / weight.sum(1, keepdim=True), value[near.indices])


@entry(clouds)
def chamfer(x: Tensor, y: Tensor) -> Tensor:
    square = all_squares(x, y)
    return square.min(1).values.mean() + square.min(0).values.mean()


@entry(clouds)
def mmd(x: Tensor, y: Tensor) -> Tensor:
    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (gaussian(a, b) + gaussian(2 * a, 2 * b)).mean()

    return kernel(x, x) + kernel(y, y) - 2 * kernel(x, y)


@entry(clouds)
def energy_distance(x: Tensor, y: Tensor) -> Tensor:
    def mean(a: Tensor, b: Tensor) -> Tensor:
        return roots(all_squares(a, b)).mean()

    return 2 * mean(x, y) - mean(x, x) - mean(y, y)


@entry(lambda n, m, d: {"x": normal(n, d), "y": normal(n, d + 1)})
def hsic(x: Tensor, y: Tensor) -> Tensor:
    n = len(x)
    centre = torch.eye(n, dtype=x.dtype, device=x.device) - 1 / n
    return (gaussian(x, x) @ centre @ gaussian(y, y) @ centre).trace() / n**2


@entry(clouds)
def sinkhorn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cost, blur = 0.5 * all_squares(x, y), 0.5
    of_x, of_y = x.new_zeros(len(x)), y.new_zeros(len(y))
    for _ in range(20):
        of_x = -blur * (((of_y - cost) / blur).logsumexp(1) - math.log(len(y)))
        of_y = -blur * (((of_x - cost.T) / blur).logsumexp(1) - math.log(len(x)))
    return of_x.mean() + of_y.mean(), of_x, of_y


@entry(lambda n, m, d: {**clouds(n, m, d), "potential": normal(m)})
def transport_map(x: Tensor, y: Tensor, potential: Tensor) -> Tensor:
    return ((potential - 0.5 * all_squares(x, y)) / 0.5).softmax(1) @ y


# Particles.


@entry(lambda n, m, d: {"x": normal(n, d), "mass": normal(n).exp()})
def gravity(x: Tensor, mass: Tensor) -> Tensor:
    apart = x - x[:, None]
    return (mass[:, None] * apart * (apart.square().sum(2, keepdim=True) + 0.01) ** -1.5).sum(1)


@entry(lambda n, m, d: {"x": normal(n, d), "score": normal(n, d)})
def svgd(x: Tensor, score: Tensor) -> Tensor:
    kernel, apart = gaussian(x, x), x[:, None] - x
    return (kernel @ score + (kernel[..., None] * apart).sum(1)) / len(x)


@entry(lambda n, m, d: {"q": normal(n, d), "p": normal(n, d, spread=0.3)})
def shooting(q: Tensor, p: Tensor) -> Tensor:
    for _ in range(5):
        kernel = gaussian(q, q)
        force = ((kernel * (p @ p.T))[..., None] * (q[:, None] - q)).sum(1)
        q, p = q + kernel @ p / 5, p + force / 5
    return q


@entry(lambda n, m, d: {"x": normal(n, d + 2), "y": normal(n, d), "beta": normal(n, spread=0.1).exp()})
def tsne(x: Tensor, y: Tensor, beta: Tensor) -> Tensor:
    n, others = len(x), ~torch.eye(len(x), dtype=torch.bool, device=x.device)
    near = (-beta[:, None] * all_squares(x, x)).masked_fill(~others, -math.inf).softmax(1)
    p = (near + near.T) / (2 * n)
    student = 1 / (1 + all_squares(y, y))
    q = torch.where(others, student, 0.0)
    q = q / q.sum()
    return -(p[others] * q[others].log()).sum()


# Weights of values.


def queries(n: int, m: int, d: int) -> Inputs:
    return {"q": normal(n, d), "k": normal(m, d), "v": normal(m, 5)}


def how_far_behind(scores: Tensor) -> Tensor:
    """How far each column is before its row."""
    rows, columns = (torch.arange(size, dtype=scores.dtype, device=scores.device) for size in scores.shape)
    return rows[:, None] - columns


@entry(queries)
def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    score = q @ k.T / q.shape[1] ** 0.5
    behind = how_far_behind(score)
    score = 30 * (score / 30).tanh() - 0.1 * behind
    score = score.masked_fill(behind < 0, -math.inf)
    return score.softmax(1) @ v, score.logsumexp(1)


@entry(lambda n, m, d: {"state": normal(n, d), "pattern": unit(m, d)})
def hopfield(state: Tensor, pattern: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(3):
        state = (4 * state @ pattern.T).softmax(1) @ pattern
    return state, state.square().sum(1) / 2 - (4 * state @ pattern.T).logsumexp(1) / 4


@entry(lambda n, m, d: {**queries(n, m, d), "log_decay": torch.tensor(-0.1, dtype=F64)})
def retention(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Tensor:
    score = q @ k.T
    behind = how_far_behind(score)
    decay = torch.where(behind < 0, 0.0, (log_decay * behind.clamp(min=0)).exp())
    return (score * decay) @ v


@entry(lambda n, m, d: {"slot": normal(n, d), "key": normal(m, d), "value": normal(m, 5)})
def slots(slot: Tensor, key: Tensor, value: Tensor) -> Tensor:
    chosen = (slot @ key.T / slot.shape[1] ** 0.5).softmax(0)
    return (chosen / chosen.sum(1, keepdim=True)) @ value


@entry(lambda n, m, d: {**queries(n, m, d), "other_q": normal(n, d), "other_k": normal(m, d)})
def differential_attention(q: Tensor, k: Tensor, v: Tensor, other_q: Tensor, other_k: Tensor) -> Tensor:
    first, second = (a @ b.T / q.shape[1] ** 0.5 for a, b in ((q, k), (other_q, other_k)))
    masked = (t.masked_fill(how_far_behind(t) < 0, -math.inf) for t in (first, second))
    return next(masked).softmax(1) @ v - 0.5 * next(masked).softmax(1) @ v


# The tests.


def modules() -> Iterator[ModuleType]:
    for path in sorted(GALLERY.glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"gallery_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # functions are traced by the module's name
        spec.loader.exec_module(module)
        yield module


MODULES = list(modules())
FUNCTIONS = {name: of for module in MODULES for name, of in vars(module).items() if inspect.isfunction(of)}


def function_of(name: str) -> Callable[..., Any]:
    function = FUNCTIONS[name]
    return partial(function, steps=150) if name == "ridge" else function


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def check(name: str, inputs: Inputs, **options: bool) -> None:
    """Hold results and gradients to the rule. options: of `accuracy_failures`."""
    function, (_, reference) = function_of(name), ENTRIES[name]
    wide = {key: t.double() if t.is_floating_point() else t for key, t in inputs.items()}
    differentiate = [key for key, t in inputs.items() if t.is_floating_point()]
    dtype = inputs[differentiate[0]].dtype
    with one_thread():
        expected, found = as_tuple(reference(**wide)), as_tuple(function(**inputs))
    assert len(found) == len(expected)
    for y, ref in zip(found, expected, strict=True):
        assert y.shape == ref.shape
        if not ref.is_floating_point() and dtype == F64:
            assert torch.equal(y, ref)
    upstream = [torch.randn_like(y) for y in as_outputs(found)]
    results = run(function, inputs, {}, differentiate, upstream)
    refs = run(reference, wide, {}, differentiate, [g.double() for g in upstream])
    bases = refs
    if dtype != F64:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Statistics, "__call__", Statistics.reference)
            bases = run(function, inputs, {}, differentiate, upstream)
    failures, rows = [], max(t.shape[0] for t in inputs.values() if t.dim())
    for i, of in enumerate(zip(*(outputs for outputs, _ in (results, refs, bases)), strict=True)):
        failures += accuracy_failures(f"out{i}", *of, dtype, rows, **options)
    for key in differentiate:
        of = (results[1][key], refs[1][key], bases[1][key])
        failures += accuracy_failures(f"d_{key}", *of, dtype, rows, **options)
    raise_failures(name, failures)


@pytest.mark.parametrize("name", ENTRIES)
def test_float64(name: str) -> None:
    check(name, ENTRIES[name][0](37, 53, 9))


@pytest.mark.parametrize("sizes", ((5, 3, 1), (6, 1, 2)), ids=("one coordinate", "one column"))
@pytest.mark.parametrize("name", ENTRIES)
def test_small_sizes(name: str, sizes: tuple[int, int, int]) -> None:
    check(name, ENTRIES[name][0](*sizes), generated=True)


def in_dtype(
    name: str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    sizes: tuple[int, int, int] = (60, 130, 16),
) -> Inputs:
    inputs = ENTRIES[name][0](*sizes)
    return {key: t.to(device, dtype if t.is_floating_point() else t.dtype) for key, t in inputs.items()}


@pytest.mark.parametrize("name", ENTRIES)
def test_float32(name: str, device: torch.device) -> None:
    sizes = (400, 430, 24)  # torch's largest error, with which ours is compared, is one of many
    check_draws(lambda: check(name, in_dtype(name, torch.float32, device, sizes), drawn_again=True))


# Not points, as their coordinates have more than 8 bits.
OF_16_BITS = [*vars(MODULES[1]), *vars(MODULES[-1]), "clip", "siglip", "max_sim"]


@pytest.mark.parametrize("name", [name for name in ENTRIES if name in OF_16_BITS])
def test_bfloat16(name: str) -> None:
    check_draws(lambda: check(name, in_dtype(name, torch.bfloat16), drawn_again=True))


# Formulas that divide by the number of rows, or take the logarithm of it.
NOT_EMPTY = "supcon", "hard_negatives", "alignment_and_uniformity", "triplet", "chamfer", "hsic", "sinkhorn"


@pytest.mark.parametrize("name", [name for name in ENTRIES if name not in NOT_EMPTY])
def test_no_rows(name: str) -> None:
    inputs, (_, reference) = ENTRIES[name][0](0, 7, 3), ENTRIES[name]
    expected, found = as_tuple(reference(**inputs)), as_tuple(function_of(name)(**inputs))
    assert [y.shape for y in found] == [y.shape for y in expected]


@pytest.mark.parametrize("name", ENTRIES)
def test_layouts(name: str) -> None:
    """Tensors with gaps, and axes in the other order, have the results of contiguous ones."""
    inputs = ENTRIES[name][0](20, 30, 4)
    spread = {
        key: upstream_gradient(t).copy_(t) if t.dim() and t.is_floating_point() else t
        for key, t in inputs.items()
    }
    with one_thread():
        results = [as_tuple(function_of(name)(**given)) for given in (inputs, spread)]
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("name", ENTRIES)
def test_no_matrix_is_saved(name: str) -> None:
    """As the page says: what a function keeps for its backward pass grows with rows and columns alone."""
    inputs = {
        key: t.requires_grad_() if t.is_floating_point() else t
        for key, t in ENTRIES[name][0](150, 170, 3).items()
    }
    sizes = [0]

    def keep(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function_of(name)(**inputs)
    assert max(sizes) < 150 * 150 / 2


def test_every_function_is_tested_and_shown() -> None:
    page = (ROOT / "docs/gallery.md").read_text("utf-8")
    shown = set(re.findall(r'^--8<-- "examples/gallery/(\w+\.py):(\w+)"$', page, re.M))
    marked = set()
    for path in GALLERY.glob("*.py"):
        text = path.read_text("utf-8")
        starts, ends = (re.findall(rf"# --8<-- \[{kind}:(\w+)\]", text) for kind in ("start", "end"))
        assert starts == ends
        marked |= {(path.name, section) for section in starts}
    assert shown == marked
    assert FUNCTIONS.keys() - {"squares"} == ENTRIES.keys()
