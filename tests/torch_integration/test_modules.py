"""monoidreduce.nn: the operators' options as modules, parameters as torch.nn.Linear makes them."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re

import pytest
import torch
from torch import Tensor

import monoidreduce as mr

MODULES = (
    (mr.nn.Attention(causal=True, scale=0.5, window=(3, None), softcap=4.0, return_lse=True), mr.attention),
    (
        mr.nn.LinearCrossEntropyLoss(
            ignore_index=2,
            reduction="sum",
            label_smoothing=0.1,
            z_loss=0.01,
            softcap=5.0,
            logit_scale=0.5,
            return_lse=True,
            workspace=1 << 20,
        ),
        mr.linear_cross_entropy,
    ),
    (
        mr.nn.LinearDistillationLoss(
            loss="reverse_kl", temperature=2.0, reduction="none", teacher_grad=True, workspace=0
        ),
        mr.linear_distillation,
    ),
)


# A keyword of the functions that modules lack: they compute on one rank.
OVER_RANKS = {"ranks"}


def tensors(function: object) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    x, weight = torch.randn(5, 8), torch.randn(11, 8)
    if function is mr.attention:
        q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8)
        return (q, k, k), {"bias": torch.randn(5, 7), "seed": torch.tensor(3)}
    if function is mr.linear_cross_entropy:
        return (x, weight, torch.tensor([0, 2, 4, 6, 10])), {
            "bias": torch.randn(11),
            "class_weight": torch.rand(11),
        }
    return (x, weight, torch.randn(5, 6), torch.randn(11, 6)), {"mask": torch.rand(5) < 0.5}


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize(
    ("module", "function"), MODULES, ids=lambda p: getattr(p, "__name__", type(p).__name__)
)
def test_a_module_is_the_function_with_its_options(module: torch.nn.Module, function: object) -> None:
    positional, optional = tensors(function)
    options = {p: d.default for p, d in inspect.signature(type(module)).parameters.items() if p != "others"}
    expected = function(*positional, **optional, **module.options)  # type: ignore[operator]
    for ours, theirs in zip(as_tuple(module(*positional, **optional)), as_tuple(expected), strict=True):
        assert torch.equal(ours, theirs)
    assert not list(module.parameters()) and not module.state_dict()

    # The same names and defaults as the function's, for all that is not a tensor.
    signature = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert options == {name: signature[name].default for name in signature if name in options}
    of_calls = set(inspect.signature(type(module).forward).parameters) - {"self"}
    assert set(signature) - set(options) - OVER_RANKS == of_calls
    assert all(f"{name}={value!r}" in repr(module) for name, value in module.options.items())


def test_dropout_of_attention_in_training_alone() -> None:
    q, k, v = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 7, 8), torch.randn(1, 2, 7, 3)
    module = mr.nn.Attention(dropout_p=0.5, causal=True)
    dropped = mr.attention(q, k, v, causal=True, dropout_p=0.5, seed=3)
    assert torch.equal(module(q, k, v, seed=3), dropped)
    for seed in (None, 3):
        assert torch.equal(module.eval()(q, k, v, seed=seed), mr.attention(q, k, v, causal=True))
    with pytest.raises(ValueError, match="dropout_p: expected a number from 0 to below 1"):
        mr.nn.Attention(dropout_p=1.0)


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_is_initialised_as_two_linears(bias: bool) -> None:
    torch.manual_seed(3)
    module = mr.nn.MLP(8, 24, 5, activation="silu", bias=bias)
    torch.manual_seed(3)
    first, second = torch.nn.Linear(8, 24, bias), torch.nn.Linear(24, 5, bias)
    assert set(module.state_dict()) == ({"w1", "w2", "bias1", "bias2"} if bias else {"w1", "w2"})
    assert torch.equal(module.w1, first.weight) and torch.equal(module.w2, second.weight)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(module(x), second(torch.nn.functional.silu(first(x))))
    assert repr(module) == f"MLP(8, 24, 5, activation='silu', bias={bias})"


@pytest.mark.parametrize("bias", [False, True])
def test_mlp_on_meta_becomes_real(bias: bool) -> None:
    """As FSDP and deferred initialisation make it: to_empty, then reset_parameters of each module."""
    module = mr.nn.MLP(8, 24, 5, bias=bias, device="meta").to_empty(device="cpu")
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, torch.nan)
    torch.manual_seed(3)
    module.reset_parameters()
    torch.manual_seed(3)
    expected = mr.nn.MLP(8, 24, 5, bias=bias)
    for (name, ours), (same, theirs) in zip(
        module.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == same and torch.equal(ours, theirs)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_is_initialised_as_three_linears(bias: bool) -> None:
    torch.manual_seed(3)
    module = mr.nn.MLP(8, 24, 5, activation="silu", bias=bias, gated=True)
    torch.manual_seed(3)
    up, down, gate = (torch.nn.Linear(*sizes, bias) for sizes in ((8, 24), (24, 5), (8, 24)))
    names = {"w1", "w2", "gate"} | ({"bias1", "bias2", "gate_bias"} if bias else set())
    assert set(module.state_dict()) == names
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(module(x), down(torch.nn.functional.silu(gate(x)) * up(x)))
    assert repr(module) == f"MLP(8, 24, 5, activation='silu', bias={bias}, gated=True)"
    tensors = {name: getattr(module, name) for name in ("w1", "w2", "gate", "bias1", "bias2", "gate_bias")}
    assert mr.explain(module, x) == mr.explain("mlp", x, **tensors)


def test_mlp_parameters_keep_their_order() -> None:
    """States of optimisers go by it."""
    assert [name for name, _ in mr.nn.MLP(8, 24).named_parameters()] == ["w1", "bias1", "w2", "bias2"]


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (torch.randn(5, 7), ValueError, r"x: expected shape \[..., 8\], got \[5, 7\]"),
        (torch.randn(()), ValueError, r"x: expected shape \[..., 8\], got \[\]"),
        (torch.randn(5, 8).double(), TypeError, r"x: expected torch.float32 as w1 is .*, got torch.float64"),
        (torch.randn(5, 8, device="meta"), ValueError, r"x: expected a tensor on cpu as w1, got meta"),
        (torch.zeros(5, 8, dtype=torch.int64), TypeError, r"x: expected float64, .*, got torch.int64"),
        ([1.0] * 8, TypeError, r"x: expected a tensor, got \[1.0"),
    ],
)
def test_mlp_names_the_input_that_does_not_fit_it(
    wrong: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        mr.nn.MLP(8, 24)(wrong)


def test_mlp_under_autocast_takes_any_dtype_but_float64() -> None:
    module = mr.nn.MLP(8, 24)
    with torch.autocast("cpu", torch.bfloat16):
        assert module(torch.randn(5, 8).half()).dtype == torch.bfloat16
        with pytest.raises(ValueError, match=r"x: expected shape \[..., 8\], got \[5, 7\]"):
            module(torch.randn(5, 7))
        with pytest.raises(TypeError, match=r"x: expected torch.float32 as w1 is .*, got torch.float64"):
            module(torch.randn(5, 8).double())


@pytest.mark.parametrize(
    ("module", "option", "wrong", "error", "expected"),
    [
        (mr.nn.Attention, "scale", "x", TypeError, "a finite number"),
        (mr.nn.Attention, "causal", 1, TypeError, "True or False"),
        (mr.nn.Attention, "window", 3, TypeError, r"None or \(left, right\)"),
        (mr.nn.Attention, "softcap", -1.0, ValueError, "a finite number > 0"),
        (mr.nn.Attention, "return_lse", None, TypeError, "True or False"),
        (mr.nn.LinearCrossEntropyLoss, "reduction", "avg", ValueError, "one of none, mean, sum"),
        (mr.nn.LinearCrossEntropyLoss, "ignore_index", 1.5, TypeError, "an int"),
        (mr.nn.LinearCrossEntropyLoss, "workspace", -1, ValueError, "None or an int >= 0"),
        (mr.nn.LinearDistillationLoss, "loss", "kl", ValueError, "one of cross_entropy, forward_kl"),
        (mr.nn.LinearDistillationLoss, "temperature", 0, ValueError, "a finite number > 0"),
    ],
)
def test_wrong_options_are_refused_at_construction(
    module: type[torch.nn.Module], option: str, wrong: object, error: type[Exception], expected: str
) -> None:
    before = mr._C.path_counts()
    with pytest.raises(error, match=f"{option}: expected .*{expected}.*, got {re.escape(repr(wrong))}"):
        module(**{option: wrong})
    assert mr._C.path_counts() == before


@pytest.mark.parametrize(
    "module",
    [
        mr.nn.LinearCrossEntropyLoss(label_smoothing=0.5),
        mr.nn.LinearCrossEntropyHead(4, 5, label_smoothing=0.5),
    ],
    ids=lambda module: type(module).__name__,
)
def test_an_option_is_no_attribute(module: torch.nn.Module) -> None:
    """An attribute of its name would be read by no call. The dict of options is."""
    with pytest.raises(
        AttributeError, match=r"label_smoothing: an option; write options\['label_smoothing'\] ="
    ):
        module.label_smoothing = 0.0
    module.options["label_smoothing"] = 0.0
    x, weight, target = torch.randn(3, 4), torch.randn(5, 4), torch.arange(3)
    if isinstance(module, mr.nn.LinearCrossEntropyHead):
        weight, found = module.weight, module(x, target)
    else:
        found = module(x, weight, target)
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(x @ weight.T, target))


@pytest.mark.parametrize("of_call", [False, True])
@pytest.mark.parametrize(
    ("module", "keyword", "ours"),
    [
        (mr.nn.Attention, "is_causal", "write causal"),
        (mr.nn.Attention, "attn_mask", "write bias"),
        (mr.nn.LinearCrossEntropyLoss, "ce_weight", "write class_weight"),
        (mr.nn.LinearDistillationLoss, "kind", "write loss"),
    ],
)
def test_what_others_call_it(module: type[torch.nn.Module], keyword: str, ours: str, of_call: bool) -> None:
    function = next(f for m, f in MODULES if type(m) is module)
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{keyword}'; .*{ours}"):
        module()(*tensors(function)[0], **{keyword: None}) if of_call else module(**{keyword: None})


def test_mlp_options() -> None:
    module = mr.nn.MLP(8, 24, dtype=torch.float64, device="meta")
    assert module.w2.shape == (8, 24) and module.w1.dtype == torch.float64 and module.w1.is_meta
    with pytest.raises(ValueError, match=r"activation: expected one of relu, .*, got 'swish'"):
        mr.nn.MLP(8, 24, activation="swish")
    for sizes in ((-1, 24, 8), (8, -1, 8), (8, 24, -1)):
        with pytest.raises(ValueError, match="_features: expected an int >= 0, got -1"):
            mr.nn.MLP(*sizes)
    for sizes in ((8.0, 24, 8), (8, "24", 8), (8, 24, True)):
        with pytest.raises(TypeError, match="_features: expected an int >= 0, got"):
            mr.nn.MLP(*sizes)
    with pytest.raises(TypeError, match="bias: expected True or False, got None"):
        mr.nn.MLP(8, 24, bias=None)
    with pytest.raises(TypeError, match="gated: expected True or False, got 'silu'"):
        mr.nn.MLP(8, 24, gated="silu")


@pytest.mark.parametrize(
    "module",
    [mr.nn.MLP(8, 24), mr.nn.MLP(8, 24, gated=True), *(module for module, _ in MODULES)],
    ids=lambda m: type(m).__name__,
)
def test_modules_can_be_copied_pickled_and_saved(module: torch.nn.Module) -> None:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for twin in (
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(buffer, weights_only=False),
    ):
        assert repr(twin) == repr(module)
        for name, value in module.state_dict().items():
            assert torch.equal(twin.state_dict()[name], value)


def test_mlp_in_half_precision_and_in_training() -> None:
    module = mr.nn.MLP(8, 24).bfloat16()
    before = copy.deepcopy(module.state_dict())
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.randn(5, 8, dtype=torch.bfloat16)).float().square().mean().backward()
    optimiser.step()
    assert all(not torch.equal(before[name], value) for name, value in module.state_dict().items())
