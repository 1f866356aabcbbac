"""linear_topk and linear_sample: values, gradients and edges against torch, and samples against their own
numbers in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decoding import head_inputs, kept_classes, packed, sample_oracle, sampled, scores_of
from specimens import DTYPES, name_of
from tolerance import check_operator
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "all": {"temperature": 0.7, "softcap": 6.0, "logit_scale": 1.3},
}


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("bias", (False, True), ids=("no_bias", "bias"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_topk(options: dict[str, Any], bias: bool, dtype: torch.dtype, device: torch.device) -> None:
    inputs = head_inputs((2, 30), 131, dtype=dtype, device=device, bias=bias)
    check_operator("linear_topk", inputs, {"k": 7, **options})


@pytest.mark.parametrize("k", (1, 2, 3, 33, 64))
@pytest.mark.parametrize("classes", (1, 2, 40, 300))
def test_topk_is_that_of_torch(k: int, classes: int, device: torch.device) -> None:
    inputs = head_inputs(9, classes, dtype=torch.float64, device=device)
    for workspace in (None, 0):
        found, few = mr.linear_topk(**inputs, k=k, workspace=workspace), min(k, classes)
        log_probs = (inputs["x"] @ inputs["weight"].T).log_softmax(-1)
        values, index = log_probs.topk(few)
        torch.testing.assert_close(found.log_probs[:, :few], values)
        assert torch.equal(found.index[:, :few], index)
        assert (found.log_probs[:, few:] == -math.inf).all() and (found.index[:, few:] == -1).all()


def test_topk_takes_the_lower_of_equal_classes(device: torch.device) -> None:
    weight = torch.tensor([[1.0], [3.0], [2.0], [3.0], [3.0]], device=device)
    found = mr.linear_topk(torch.ones(1, 1, device=device), weight, 4)
    assert found.index.tolist() == [[1, 3, 4, 2]]


@pytest.mark.parametrize("temperature", (0.7, None), ids=("number", "of_tokens"))
def test_topk_that_is_differentiated(temperature: float | None, device: torch.device) -> None:
    """It has the same bits, also where logits are -inf, and torch's gradients; the latter by the kernels."""
    inputs = head_inputs(20, 90, dtype=torch.float32, device=device, bias=True)
    inputs["bias"][5:] = -math.inf
    at = 0.5 + torch.rand(20, device=device) if temperature is None else temperature
    options: Any = {"k": 7, "temperature": at, "softcap": 20.0}
    leaves = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    with torch.profiler.profile() as profile:
        found = mr.linear_topk(**leaves, **options)
        upstream = torch.randn_like(found.log_probs).masked_fill(found.log_probs == -math.inf, 0)
        gradients = torch.autograd.grad(
            (found.log_probs, found.lse), list(leaves.values()), (upstream, torch.ones_like(found.lse))
        )
    assert all(map(torch.equal, found, mr.linear_topk(**inputs, **options)))
    assert not any("statistics_backward" in event.name for event in profile.events())
    scores = scores_of(**leaves, **{name: value for name, value in options.items() if name != "k"})
    log_p, lse = scores.log_softmax(1), scores.logsumexp(1)
    expected = torch.autograd.grad(
        (log_p.gather(1, found.index), lse), list(leaves.values()), (upstream, torch.ones_like(lse))
    )
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs.nan_to_num(0), rtol=1e-4, atol=1e-5)


def test_topk_gradcheck(device: torch.device) -> None:
    torch.manual_seed(3)
    place: Any = {"dtype": torch.float64, "device": device, "requires_grad": True}
    tensors = tuple(torch.randn(*shape, **place) for shape in ((4, 3), (9, 3), (9,)))

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        found = mr.linear_topk(x, weight, 3, bias=bias, softcap=3.0, temperature=0.6)
        return found.log_probs, found.lse

    assert torch.autograd.gradcheck(call, tensors)


def test_temperature_of_each_token(device: torch.device) -> None:
    inputs = head_inputs((3, 5), 90, dtype=torch.float32, device=device)
    temperature = 0.3 + torch.rand(3, 5, device=device)
    check_operator("linear_topk", inputs, {"k": 4, "temperature": temperature})
    each = [
        mr.linear_sample(inputs["x"], inputs["weight"], seed=1, temperature=t) for t in (temperature, 0.5)
    ]
    assert each[0].index.shape == each[1].index.shape == (3, 5)
    temperature[0, 1], temperature[2, 2] = -1, math.inf
    for of in (
        mr.linear_topk(**inputs, k=4, temperature=temperature).log_probs[..., 0],
        mr.linear_sample(**inputs, seed=1, temperature=temperature).log_prob,
    ):
        wrong = of.isnan()
        assert wrong[0, 1] and wrong[2, 2] and wrong.sum() == 2


@pytest.mark.isa
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("kept", (False, True), ids=("all_classes", "kept"))
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_sample(
    options: dict[str, Any],
    kept: bool,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The sample is that of float64 scores and the same random numbers, but where two sums are equal up to
    rounding; and its log-probability and the entropy are as accurate as torch's."""
    shape, classes, seed = (2, 50), 131, 7
    inputs = head_inputs(shape, classes, dtype=dtype, device=device, bias=True)
    keep = kept_classes(shape, classes, device) if kept else None
    words = None if keep is None else packed(keep)
    found = mr.linear_sample(**inputs, **options, kept=words, seed=seed)
    wide = {name: t.double() for name, t in inputs.items()}
    expected, margin = sampled(seed, scores_of(**wide, **options, kept=keep))
    clear = margin > 1e-4
    assert clear.sum() >= 95 and torch.equal(found.index[clear], expected[clear])
    assert (found.index >= -1).all() and (found.index < classes).all()

    def call(**tensors: Tensor) -> Any:
        return mr.linear_sample(**tensors, **options, kept=words, seed=seed, entropy=True)[1:]

    monkeypatch.setattr(
        reference, "linear_sample", sample_oracle(found.index, kept=keep, **options), raising=False
    )
    check_operator("linear_sample", inputs, function=call)


@pytest.mark.isa
@pytest.mark.parametrize(
    ("offset", "dtype"),
    [
        (0.0, torch.float64),
        *((offset, dtype) for offset in (0.0, 1000.0) for dtype in DTYPES if dtype != torch.float64),
    ],
    ids=str,
)
def test_entropies_of_peaked_distributions(
    offset: float, dtype: torch.dtype, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As accurate as torch's -sum p log p, though entropies from 1e-8 on are those of logits up to 20000."""
    inputs = head_inputs(400, 131, 64, dtype=dtype, device=device, bias=True)
    inputs["bias"] = inputs["bias"] + offset
    options: dict[str, Any] = {"temperature": 0.05}
    oracle = sample_oracle(mr.linear_sample(**inputs, **options, seed=3).index, **options)
    monkeypatch.setattr(reference, "linear_sample", lambda **of: oracle(**of)[1], raising=False)

    def entropy(**tensors: Tensor) -> Any:
        found = mr.linear_sample(**tensors, **options, seed=3, entropy=True)
        assert found.entropy is not None and (found.entropy >= 0).all() and (found.log_prob <= 0).all()
        return found.entropy

    check_operator("linear_sample", inputs, function=entropy)


def test_a_row_without_kept_classes(device: torch.device) -> None:
    inputs = head_inputs(3, 70, dtype=torch.float32, device=device)
    leaves = {name: t.requires_grad_() for name, t in inputs.items()}
    words = torch.zeros(3, 3, dtype=torch.int32, device=device)
    words[1, 2] = 1 << 4  # class 68
    found = mr.linear_sample(**leaves, seed=0, kept=words, entropy=True)
    assert found.entropy is not None
    assert found.index.tolist() == [-1, 68, -1]
    assert found.log_prob.tolist() == [-math.inf, 0.0, -math.inf] and found.entropy.tolist() == [0.0] * 3
    gradients = torch.autograd.grad((found.log_prob[1] + found.entropy.sum()), list(leaves.values()))
    assert all(not g.any() for g in gradients)


@pytest.mark.parametrize("kept", (False, True))
def test_temperature_0_takes_the_largest(kept: bool, device: torch.device) -> None:
    inputs = head_inputs(6, 90, dtype=torch.float32, device=device, bias=True)
    keep = kept_classes((6,), 90, device) if kept else None
    words = None if keep is None else packed(keep)
    each = torch.tensor([0.0, 1.0, 0.0, 0.7, 0.0, 0.0], device=device)
    zero = torch.zeros((), device=device)
    expected = scores_of(**inputs, kept=keep).argmax(-1)
    if kept:
        expected[0] = -1
    for temperature in (0, 0.0, zero, each):
        found = mr.linear_sample(**inputs, seed=5, temperature=temperature, kept=words, entropy=True)
        greedy = (each == 0) if temperature is each else torch.ones_like(each, dtype=torch.bool)
        assert torch.equal(found.index[greedy], expected[greedy])
        has = greedy & (expected >= 0)
        assert found.entropy is not None
        assert not found.log_prob[has].any() and not found.entropy[greedy].any()
    drawn = mr.linear_sample(**inputs, seed=5, temperature=torch.where(each == 0, 1.0, each), kept=words)
    assert torch.equal(found.index[each > 0], drawn.index[each > 0])


def test_samples_have_the_distribution(device: torch.device) -> None:
    """The largest deviation of 200000 draws is within what 4.5 standard deviations allow, of 12 classes; and
    draws of two seeds are independent."""
    torch.manual_seed(0)
    logits = torch.tensor([2.0, -1.0, 0.0, 1.5, -3.0, 0.3, 0.2, -0.5, 1.0, -8.0, 0.7, -2.0], device=device)
    x = torch.ones(100000, 1, device=device)
    p, counts, both = logits.double().softmax(0), torch.zeros(12, device=device), []
    for seed in (1, 2):
        index = mr.linear_sample(x, logits[:, None], seed=seed).index
        counts += torch.bincount(index, minlength=12)
        both.append(index)
    n = 2 * len(x)
    assert ((counts / n - p).abs() < 4.5 * (p * (1 - p) / n).sqrt() + 1e-7).all()
    same, expected = (both[0] == both[1]).double().mean(), (p * p).sum()
    assert abs(same - expected) < 4.5 * math.sqrt(expected * (1 - expected) / len(x))


def test_the_seed_alone_decides(device: torch.device) -> None:
    """Not the width of the operands, the number of rows, or classes that cannot be drawn."""
    inputs = head_inputs(40, 200, dtype=torch.float32, device=device)
    x, weight = inputs["x"], inputs["weight"]
    first = mr.linear_sample(x, weight, seed=2**40 + 1)
    again = mr.linear_sample(x, weight, seed=torch.tensor(2**40 + 1))
    assert torch.equal(first.index, again.index) and torch.equal(first.log_prob, again.log_prob)
    assert torch.equal(mr.linear_sample(x[:7], weight, seed=2**40 + 1).index, first.index[:7])
    assert not torch.equal(mr.linear_sample(x, weight, seed=2).index, first.index)
    words = packed(torch.arange(300, device=device).expand(40, 300) < 200)
    more = torch.cat((weight, 100 * torch.ones_like(weight[:100])))
    assert torch.equal(mr.linear_sample(x, more, seed=2**40 + 1, kept=words).index, first.index)


def test_nan(device: torch.device) -> None:
    inputs = head_inputs(3, 40, dtype=torch.float32, device=device)
    inputs["x"][1, 0] = math.nan
    found = mr.linear_sample(**inputs, seed=1, entropy=True)
    assert found.entropy is not None
    assert found.index[1] == -1 and found.log_prob[1].isnan() and found.entropy[1].isnan()
    assert found.index[[0, 2]].min() >= 0 and found.log_prob[[0, 2]].isfinite().all()
    topk = mr.linear_topk(**inputs, k=3)
    assert topk.log_probs[1].isnan().all() and topk.log_probs[[0, 2]].isfinite().all()


@pytest.mark.parametrize("rows, classes", ((0, 5), (3, 0), (0, 0)))
def test_empty(rows: int, classes: int, device: torch.device) -> None:
    x, weight = torch.randn(rows, 4, device=device), torch.randn(classes, 4, device=device)
    leaves = (x.requires_grad_(), weight.requires_grad_())
    topk = mr.linear_topk(x, weight, 2)
    words = torch.full((rows, -(-classes // 32)), -1, dtype=torch.int32, device=device)
    for kept in (None, words):
        found = mr.linear_sample(x, weight, seed=1, kept=kept, entropy=True)
        assert found.entropy is not None
        assert (found.index == -1).all() and (found.log_prob == -math.inf).all() and not found.entropy.any()
        assert found.index.shape == (rows,)
        gradients = torch.autograd.grad((found.entropy.sum() + topk.lse.sum()), leaves, retain_graph=True)
        assert all(not g.any() for g in gradients)
    assert topk.log_probs.shape == (rows, 2) and (topk.index == -1).all()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=name_of)
def test_autocast(dtype: torch.dtype, device: torch.device) -> None:
    inputs = head_inputs(20, 90, dtype=torch.float32, device=device, bias=True)
    rounded = {name: t.to(dtype) for name, t in inputs.items()}
    with torch.autocast(device.type, dtype):
        found = mr.linear_topk(**inputs, k=3), mr.linear_sample(**inputs, seed=1, entropy=True)
    expected = mr.linear_topk(**rounded, k=3), mr.linear_sample(**rounded, seed=1, entropy=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(tuple(ours), tuple(theirs), rtol=0, atol=0)


def test_vmap(device: torch.device) -> None:
    x, weight = torch.randn(3, 8, 6, device=device), torch.randn(50, 6, device=device)
    words = packed(kept_classes((3, 8), 50, device))

    def call(x: Tensor, words: Tensor) -> tuple[Tensor, ...]:
        found = mr.linear_sample(x, weight, seed=4, kept=words)
        return *mr.linear_topk(x, weight, 5), found.index, found.log_prob

    each = [call(*of) for of in zip(x, words, strict=True)]
    for found, expected in zip(torch.vmap(call)(x, words), zip(*each, strict=True), strict=True):
        assert torch.equal(found, torch.stack(expected))


def test_compiled(device: torch.device) -> None:
    """A graph for all seeds and temperatures; the same bits as without."""
    inputs = head_inputs(20, 90, dtype=torch.float32, device=device)
    words = packed(kept_classes((20,), 90, device))

    def call(x: Tensor, weight: Tensor, words: Tensor, seed: int, temperature: float) -> tuple[Tensor, ...]:
        found = mr.linear_sample(x, weight, seed=seed, kept=words, temperature=temperature, softcap=9.0)
        best = mr.linear_topk(x, weight, 3, temperature=temperature)
        return found.index, found.log_prob, *best

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for seed, temperature in ((1, 0.5), (2, 0.6), (3, 0.7), (4, 0.8)):
        leaves = [inputs[name].clone().requires_grad_() for name in ("x", "weight")]
        found, expected = (f(*leaves, words, seed, temperature) for f in (compiled, call))
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)
        grads = [torch.autograd.grad(of[2].sum() + of[1][1:].sum(), leaves) for of in (found, expected)]
        assert all(map(torch.equal, *grads))


def test_explain_and_cost() -> None:
    x, weight = (torch.empty(n, 256, device="meta", dtype=torch.bfloat16) for n in (512, 2000))
    words = torch.empty(512, 63, device="meta", dtype=torch.int32)
    for told in (
        mr.explain(mr.linear_topk, x, weight, 7, hardware="h100"),
        mr.explain("linear_sample", x, weight, seed=3, kept=words, hardware="h100"),
    ):
        assert told.forward == "statistics_fold/cuda/sm90/bfloat16" and told.deterministic
    found = {
        dtype: str(mr.explain(mr.linear_topk, x.to(dtype), weight.to(dtype), 7, hardware="h100"))
        for dtype in (torch.bfloat16, torch.float32)
    }
    assert "the kernels find the k largest\n" in found[torch.bfloat16]
    assert "torch finds the k largest, in chunks of columns" in found[torch.float32]
    for dtype, text in found.items():
        assert "soft targets of linear_cross_entropy (log_probs_forward/cuda/" in text
        assert (
            "  backward      log_probs_backward/cuda/" in text and str(dtype).removeprefix("torch.") in text
        )
    for hardware in ("h100", "cpu"):
        whole = mr.cost(mr.linear_sample, x, weight, seed=3, hardware=hardware, needed=())
        assert whole.useful_flops == 2 * 512 * 2000 * 256 and whole.operator == "linear_sample"
        assert mr.cost("linear_topk", x, weight, 7, hardware=hardware).seconds > whole.seconds


def test_errors(device: torch.device) -> None:
    x, weight = torch.randn(4, 6, device=device), torch.randn(50, 6, device=device)
    words = torch.zeros(4, 2, dtype=torch.int32, device=device)
    temperature = torch.ones(4, device=device, requires_grad=True)
    wrong: list[tuple[Any, str]] = [
        (lambda: mr.linear_topk(x, weight, 0), "k: expected an int from 1 to 64, got 0"),
        (lambda: mr.linear_topk(x, weight, 65), "k: expected an int from 1 to 64, got 65"),
        (lambda: mr.linear_topk(x, weight, 2.5), "k: expected an int from 1 to 64"),  # type: ignore[arg-type]
        (lambda: mr.linear_topk(x, weight[:, :5], 2), "weight"),
        (lambda: mr.linear_topk(x, weight, 2, bias=weight), "bias"),
        (lambda: mr.linear_topk(x, weight, 2, temperature=0), "temperature: expected a finite number > 0"),
        (lambda: mr.linear_topk(x, weight, 2, temperature=temperature), "requires no gradient"),
        (lambda: mr.linear_topk(x, weight, 2, softcap=-1.0), "softcap"),
        (lambda: mr.linear_topk(x, weight, 2, workspace=-1), "workspace"),
        (lambda: mr.linear_topk(x, weight, 2, classes=4), "mr.Ranks"),  # type: ignore[arg-type]
        (lambda: mr.linear_sample(x, weight, seed=1, temperature=-1), "temperature: expected 0 or a finite"),
        (lambda: mr.linear_sample(x, weight, seed=1, temperature=temperature), "requires no gradient"),
        (lambda: mr.linear_sample(x, weight, seed=2**63), "seed: expected an int of 64 bits"),
        (lambda: mr.linear_sample(x, weight, seed=1.5), "seed: expected an int of 64 bits"),  # type: ignore[arg-type]
        (lambda: mr.linear_sample(x, weight, seed=words), "seed: expected an int of 64 bits"),
        (lambda: mr.linear_sample(x, weight, seed=1, kept=words[:3]), "kept: expected shape [4, 2]"),
        (lambda: mr.linear_sample(x, weight, seed=1, kept=words[:, :1]), "kept: expected shape [4, 2]"),
        (
            lambda: mr.linear_sample(x, weight, seed=1, kept=words.long()),
            "kept: expected a tensor of torch.int32",
        ),
        (lambda: mr.linear_sample(x, weight, seed=1, entropy=1), "entropy"),  # type: ignore[arg-type]
        (lambda: mr.linear_sample(x, weight, seed=1, top_p=0.5), "kept"),  # type: ignore[arg-type]
        (lambda: mr.linear_sample(x, weight.double(), seed=1), "weight"),
    ]
    for call, text in wrong:
        with pytest.raises((TypeError, ValueError)) as error:
            call()
        assert text in str(error.value), str(error.value)
