"""The acceptance rule of the operator tests: as accurate as torch operations in the same dtype.

For a tensor y (an output or a gradient) computed from inputs in dtype T:

    ref   = the reference in float64 on the T-rounded inputs          (the oracle)
    base  = the reference in T: products in T, statistics in float32  (what a user would write)
    floor = 2 max|((r + 0.3) - 0.3) - r|                              (the rounding of y's dtype)

    max |y - ref|  <= 2   max |base - ref|  + floor
    mean|y - ref|  <= 1.5 mean|base - ref|  + floor / 16              (one wrong tile behind a large maximum)
    NaN and inf exactly where ref has them

For T = float32 there is a last clause, element by element: |y - ref| <= 1e-5 |ref| + 1e-6 max|ref|, or the
bound of the first clause where that is larger, as where large terms cancel. For T = float64 the base is the
oracle, so the rule is |y - ref| <= 1e-10 |ref| + 1e-12 max|ref|.

Errors of few numbers depend on luck: one rounded log-sum-exp shifts a whole row. So the clause of the mean
applies only to 64 elements or more. For float32 results, where the base has next to no error, it applies only
to 8192 elements or more in 384 rows or more. The same is true of the clause of the maximum if the inputs are
float32 too. Results with fewer are held to the last clause. (An attention backward that recomputes, written
in torch, reached 3.1 times the base's largest error in 30 seeds of 296 rows on a GPU.) Each operator has a
test_accuracy with 400 rows or more.

Among hundreds of random cases some are unlucky. So for these the median of several draws of each result is
held to the first clause, and to the last clause where it allows as much (`Unlucky`). A draw of `check_pooled`
takes the errors of several inputs together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

import monoidreduce as mr
from monoidreduce import reference
from monoidreduce.functional import raises_rows


def kernels_of(operator: str) -> str | None:
    """The name of an operator's kernels in `_C.path_counts()`. None: it is composed of torch operations."""
    name = operator.removeprefix("linear_").removesuffix("_matmul").removesuffix("_varlen")
    return name if f"{name}_forward" in mr._C.CALLS else None


class Unlucky(AssertionError):
    """A random case exceeds only the bound of the largest float32 error, by less than a factor of 2.

    results: names of the outputs and gradients that do so.
    """

    def __init__(self, message: str, results: Iterable[str]) -> None:
        super().__init__(message)
        self.results = set(results)


class MayBeLuck(str):
    """A message about that bound: in the first clause, and in the last where it allows as much."""


TRIALS = 5


def check_draws(check: Callable[[], object]) -> None:
    """Hold a random case to the rule. `check` draws new values in every call.

    If the first draw is `Unlucky`, the median over TRIALS draws of each result has to keep the rule:
    `Unlucky` is raised if one result breaks it in most draws.
    """
    unlucky: Counter[str] = Counter()
    for trial in range(TRIALS):
        try:
            check()
        except Unlucky as case:
            unlucky.update(case.results)
            if 2 * max(unlucky.values()) > TRIALS:
                raise
        else:
            if trial == 0:
                return


def rounding_floor(ref: Tensor, dtype: torch.dtype) -> float:
    """2 max|((r + 0.3) - 0.3) - r| over r in ref and over 257 numbers in its range.

    The latter, because the rounding of few r may be small by luck.
    """
    rounded = ref.to(dtype).flatten()
    magnitude = max(0.3, float(rounded.abs().max())) if rounded.numel() else 0.3
    probe = torch.linspace(-magnitude, magnitude, 257, dtype=torch.float64, device=ref.device).to(dtype)
    rounded = torch.cat((rounded, probe))
    return 2.0 * float((((rounded + 0.3) - 0.3) - rounded).double().abs().max())


def _worst(error: Tensor, y: Tensor, ref: Tensor, base: Tensor) -> str:
    at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    return f"worst at {at}: got {float(y[at]):.9g}, oracle {float(ref[at]):.9g}, base {float(base[at]):.9g}"


def accuracy_failures(
    name: str,
    y: Tensor,
    ref: Tensor,
    base: Tensor,
    tested: torch.dtype,
    rows: int,
    generated: bool = False,
    one_column: bool = False,
    drawn_again: bool = False,
) -> list[str]:
    """Messages for the clauses that y breaks.

    Args:
        name: name of the output or gradient, for messages.
        y: the result.
        ref: result of the oracle, float64.
        base: result of the reference in the inputs' dtype; it has y's dtype.
        tested: dtype of the inputs.
        rows: number of rows of the call.
        generated: whether the case is random. Then results that are 0 in `ref` are held to the
            rounding errors of terms of unit size. (The softmax's gradient over one column is 0, in the first
            row of causal attention or in all rows; the rule is relative to results and has no bound for it.)
            As the unluckiest of hundreds of cases would decide, a float32 failure may be luck, as with
            `drawn_again`.
        one_column: whether the softmax is over one column. The terms of its gradient cancel exactly in torch,
            by luck. So float32 is held only to the clause that does not compare with torch's errors.
        drawn_again: whether the median of several draws decides. A largest error of float32 between 2 and 4
            times the base's may then be luck.
    """
    if y.shape != ref.shape or y.dtype != base.dtype:
        return [f"{name}: got {tuple(y.shape)} {y.dtype}, expected {tuple(ref.shape)} {base.dtype}"]
    dtype = y.dtype
    y, base = y.detach().double(), base.detach().double()
    ref = ref.detach()
    failures = []
    for kind, at_y, at_ref in (
        ("NaN", y.isnan(), ref.isnan()),
        ("+inf", y == torch.inf, ref == torch.inf),
        ("-inf", y == -torch.inf, ref == -torch.inf),
    ):
        if not torch.equal(at_y, at_ref):
            wrong = (at_y != at_ref).nonzero()
            first = tuple(int(i) for i in wrong[0])
            failures.append(
                f"{name}: {kind} at {int(at_y.sum())}, oracle at {int(at_ref.sum())} places; "
                f"{len(wrong)} differ, first {first}: got {float(y[first])}, oracle {float(ref[first])}"
            )
    finite = ref.isfinite() & y.isfinite()
    if not finite.any():
        return failures
    assert bool(base[finite].isfinite().all()), (
        f"{name}: the base overflows, so the rule would accept anything"
    )
    y, ref, base = (torch.where(finite, t, 0.0) for t in (y, ref, base))
    error, base_error = (y - ref).abs(), (base - ref).abs()
    magnitude = float(ref.abs().max())

    sums = torch.float64 if tested == torch.float64 else torch.float32
    left = torch.zeros_like(ref)
    if generated:
        left[ref.abs() < 1e-15] = (512 + rows) * torch.finfo(sums).eps

    if tested == torch.float64:
        excess = error - (1e-10 * ref.abs() + 1e-12 * magnitude).maximum(left)
        if bool((excess > 0).any()):
            failures.append(
                f"{name}: beyond rtol 1e-10, atol 1e-12 x {magnitude:.3g}; {_worst(excess, y, ref, base)}"
            )
        return failures

    floor, count = max(rounding_floor(ref, dtype), float(left.min())), int(finite.sum())
    comparable = dtype != torch.float32 or (rows >= 384 and count >= 8192 and not one_column)
    largest = 2.0 * float(base_error.max()) + floor
    may_be_luck = (
        (generated or drawn_again) and dtype == torch.float32 and float(error.max()) <= 2.0 * largest - floor
    )
    of_largest = MayBeLuck if may_be_luck else str
    if float(error.max()) > largest and (comparable or tested != torch.float32):
        text = f"{name}: max error {float(error.max()):.3g} > {largest:.3g}; {_worst(error, y, ref, base)}"
        failures.append(of_largest(text))
    mean, allowed = float(error.sum()) / count, 1.5 * float(base_error.sum()) / count + floor / 16
    if mean > allowed and comparable and count >= 64:
        failures.append(f"{name}: mean error {mean:.3g} > {allowed:.3g}; {_worst(error, y, ref, base)}")
    if tested == torch.float32:
        excess = error - (1e-5 * ref.abs() + 1e-6 * magnitude).clamp(min=largest).maximum(left)
        if bool((excess > 0).any()):
            text = f"{name}: beyond rtol 1e-5, atol 1e-6 x {magnitude:.3g}; {_worst(excess, y, ref, base)}"
            failures.append(of_largest(text))
    return failures


def raise_failures(of: str, failures: Sequence[str]) -> None:
    """Raise `Unlucky` if all failures may be luck, else AssertionError. failures: of `accuracy_failures`."""
    text = "\n".join([of, *failures])
    if failures and all(isinstance(failure, MayBeLuck) for failure in failures):
        raise Unlucky(text, (failure.split(":")[0] for failure in failures))
    assert not failures, text


def upstream_gradient(like: Tensor, layout: str = "strided", exact: bool = False) -> Tensor:
    """A random gradient in the shape and dtype of `like`, of several times unit size; integers if `exact`.

    Layouts:
        strided: axes stored in reverse order, in every second element, with NaN in between.
        sliced: the middle of a wider buffer of NaN, as the backward of torch.cat gives.
        expanded: one value everywhere, with stride 0, as the backward of sum gives.
        contiguous: contiguous.
    """
    shape, options = tuple(like.shape), {"dtype": like.dtype, "device": like.device}
    if layout == "expanded":
        return (1.5 + torch.rand((), device=like.device)).to(like.dtype).expand(shape)
    draw = torch.randint(-4, 5, shape) if exact else 3.0 * torch.randn(shape)
    values = draw.to(like.device, like.dtype)
    if layout == "contiguous" or not shape:
        return values
    if layout == "strided":
        reverse = tuple(range(len(shape)))[::-1]
        stored = torch.full((*shape[:0:-1], 2 * shape[0]), torch.nan, **options)[..., ::2].permute(reverse)
    elif layout == "sliced":
        stored = torch.full((*shape[:-1], shape[-1] + 3), torch.nan, **options)[..., 1:-2]
    else:
        raise ValueError(f"layout: {layout!r}")
    return stored.copy_(values)


def content(tensor: Tensor) -> Tensor:
    """The bytes of the elements. Compared so, NaN equals NaN and -0 differs from 0."""
    return tensor.detach().flatten().clone(memory_format=torch.contiguous_format).view(torch.uint8)


def passes_by_torch(operator: str, inputs: Mapping[str, Tensor], options: Mapping[str, Any]) -> set[str]:
    """The passes, "forward" and "backward", that torch computes on a GPU: of large float32 MLPs."""
    x = next(iter(inputs.values()))
    if operator != "mlp" or "gate" in inputs or not x.is_cuda or x.dtype != torch.float32:
        return set()
    explanation = mr.explain(operator, **inputs, **options)
    return {way for way in ("forward", "backward") if "/torch/" in getattr(explanation, way)}


def kernel_launches(operator: str, direction: str, device: torch.device) -> int:
    launched = f"{kernels_of(operator)}_{direction}/{device.type}/"
    return sum(n for path, n in mr._C.path_counts().items() if path.startswith(launched))


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread in the block.

    Small torch operations are faster so, many times if other processes use the cores.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_outputs(result: Tensor | Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """The results that have a gradient: not indices, and not results that were not asked for (None)."""
    results = (result,) if isinstance(result, Tensor) else result
    return tuple(t for t in results if t is not None and t.is_floating_point())


def run(
    function: Any,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any],
    differentiate: Sequence[str],
    upstream: Sequence[Tensor | None] | None,
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The outputs, and the gradients of the named inputs; zeros if no output depends on the input."""
    leaves = {name: t.detach().requires_grad_(name in differentiate) for name, t in inputs.items()}
    outputs = as_outputs(function(**leaves, **options))
    if upstream is None or not differentiate:
        return outputs, {}
    followed = [(y, g) for y, g in zip(outputs, upstream, strict=True) if g is not None and y.requires_grad]
    gradients = torch.autograd.grad(
        [y for y, _ in followed],
        [leaves[name] for name in differentiate],
        [g for _, g in followed],
        allow_unused=True,
    )
    given = zip(differentiate, gradients, strict=True)
    return outputs, {name: torch.zeros_like(leaves[name]) if g is None else g for name, g in given}


def check_operator(
    operator: str,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any] | None = None,
    *,
    differentiate: Sequence[str] | None = None,
    upstream: Sequence[Tensor | None] | str = "strided",
    exact: bool = False,
    function: Any = None,
    generated: bool = False,
) -> dict[str, Tensor]:
    """Hold each output and gradient of `mr.<operator>` to the rule; return them as "out0", ..., "d_<input>".

    Asserts that no input was written to and, unless a `function` is given or in `passes_by_torch`, that the
    library's kernels ran.

    Args:
        operator: name of the operator.
        inputs: tensors by name.
        options: other arguments.
        differentiate: names of the inputs to compute gradients of (default: every floating-point one).
        upstream: one gradient for each output, None for an output without one; or the layout of random ones.
        exact: draw integers as upstream gradients, for integer inputs with gradients that cancel to 0.
        function: called in place of `mr.<operator>`, for example a compiled one.
        generated: whether the case is random (see `accuracy_failures`). It may then raise `Unlucky`.
    """
    found, failures = _measured(operator, inputs, options, differentiate, upstream, exact, function)
    first = next(iter(inputs.values()))
    packed = operator == "attention_varlen"
    softmax_over = [inputs[name].shape[-2] for name in ("k", "weight") if name in inputs and not packed]
    generated_as = {"generated": generated, "one_column": generated and softmax_over == [1]}
    for name, result in found.items():
        failures += accuracy_failures(name, *result, first.dtype, first.shape[:-1].numel(), **generated_as)
    _raise(operator, inputs, options, failures)
    return {name: result.ours.detach() for name, result in found.items()}


def check_pooled(
    operator: str,
    draw: Callable[[], Mapping[str, Tensor]],
    options: Mapping[str, Any] | None = None,
    *,
    differentiate: Sequence[str] | None = None,
    upstream: str = "strided",
    function: Any = None,
    draws: int = 8,
) -> None:
    """Like `check_operator`, but with the errors of `draws` draws of the inputs taken together.

    Trials are repeated as in `check_draws`. For results with a largest error that one rounding decides: they
    have few elements in 16 bits, or many in float32 with errors about as large as the base's.
    """

    def check() -> None:
        measured, failures = [], []
        for _ in range(draws):
            inputs = draw()
            found, failed = _measured(operator, inputs, options, differentiate, upstream, False, function)
            measured.append(found)
            failures += failed
        first = next(iter(inputs.values()))
        rows = draws * first.shape[:-1].numel()
        for name in measured[0]:
            pooled = map(torch.stack, zip(*(found[name] for found in measured), strict=True))
            failures += accuracy_failures(name, *pooled, first.dtype, rows, drawn_again=True)
        _raise(operator, inputs, options, failures)

    check_draws(check)


class Found(NamedTuple):
    """A result, the oracle's result in float64, and the base: the oracle's in the dtype of the inputs."""

    ours: Tensor
    exact: Tensor
    base: Tensor


def _measured(
    operator: str,
    inputs: Mapping[str, Tensor],
    options: Mapping[str, Any] | None,
    differentiate: Sequence[str] | None,
    upstream: Sequence[Tensor | None] | str,
    exact: bool,
    function: Any,
) -> tuple[dict[str, Found], list[str]]:
    """The outputs and gradients of a call by name, and messages about inputs that it wrote to."""
    options = dict(options or {})
    known = {name: value for name, value in options.items() if name not in ("workspace", "compensated")}
    called = getattr(mr, operator) if function is None else function
    oracle = getattr(reference, operator)
    floating = [name for name, t in inputs.items() if t.is_floating_point()]
    differentiate = floating if differentiate is None else differentiate
    device = next(iter(inputs.values())).device

    wide = {name: t.detach().double() if name in floating else t for name, t in inputs.items()}
    copies = {name: t.detach().clone() for name, t in inputs.items()}
    # Without oneDNN: on processors with AMX its bfloat16 products have NaN next to infinities.
    with one_thread(), torch.backends.mkldnn.flags(enabled=False):
        if isinstance(upstream, str):
            upstream = [upstream_gradient(y, upstream, exact) for y in as_outputs(oracle(**copies, **known))]
        wide_upstream = [None if g is None else g.double() for g in upstream]
        refs, ref_gradients = run(oracle, wide, known, differentiate, wide_upstream)
        bases, base_gradients = run(oracle, copies, known, differentiate, upstream)

    before = {name: (content(t), t._version) for name, t in inputs.items()}
    empty = not all(t.numel() for t in inputs.values())
    counted = function is None and kernels_of(operator) and not empty
    by_torch = passes_by_torch(operator, inputs, options) if counted else set()
    launches = [kernel_launches(operator, way, device) for way in ("forward", "backward")] if counted else []
    outputs, gradients = run(called, inputs, options, differentiate, upstream)
    if counted:
        assert "forward" in by_torch or kernel_launches(operator, "forward", device) > launches[0], (
            f"{operator}: its forward kernel did not run"
        )
        # Gradients of bias2, and of a bias that adds one number to all scores of a row, need no kernel of
        # ours.
        of_torch = {"bias2"}
        if operator == "attention" and "bias" in inputs and raises_rows(inputs["bias"]):
            of_torch.add("bias")
        wanted = gradients.keys() - of_torch and any(g is not None for g in upstream)
        if wanted and "backward" not in by_torch:
            assert kernel_launches(operator, "backward", device) > launches[1], (
                f"{operator}: its backward kernel did not run"
            )

    failures = []
    for name, (bytes_before, version) in before.items():
        if inputs[name]._version != version or not torch.equal(content(inputs[name]), bytes_before):
            failures.append(f"{name}: the operator wrote to this input")
    assert len(outputs) == len(refs), f"{operator} gave {len(outputs)} outputs, expected {len(refs)}"
    found = {f"out{i}": Found(*of) for i, of in enumerate(zip(outputs, refs, bases, strict=True))}
    for name, gradient in gradients.items():
        found[f"d_{name}"] = Found(gradient, ref_gradients[name], base_gradients[name])
    return found, failures


def _raise(
    operator: str, inputs: Mapping[str, Tensor], options: Mapping[str, Any] | None, failures: Sequence[str]
) -> None:
    shapes_text = ", ".join(
        f"{name} {tuple(t.shape)} {t.dtype} strides {t.stride()}" for name, t in inputs.items()
    )
    raise_failures(f"mr.{operator}({shapes_text}, {options})", failures)
