"""Tensors that are not plain dense ones: traced without memory, resolved first, or refused by name."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from specimens import ONE_EACH, Specimen, name_of
from tolerance import as_outputs
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import monoidreduce as mr

WITH_OPS = [specimen for specimen in ONE_EACH if specimen.operator != "merge_attention"]


def outputs_of(specimen: Specimen, inputs: dict[str, Tensor]) -> tuple[Tensor, ...]:
    result = getattr(mr, specimen.operator)(**inputs, **specimen.options)
    return as_outputs(result)


def assert_alike(traced: tuple[Tensor, ...], real: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(traced, real, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype and ours.stride() == theirs.stride()


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_meta_tensors(specimen: Specimen, device: torch.device) -> None:
    real = {
        n: t.requires_grad_() if t.is_floating_point() else t
        for n, t in specimen.inputs(torch.float32, device).items()
    }
    meta = {n: t.detach().to("meta").requires_grad_(t.requires_grad) for n, t in real.items()}
    outputs = outputs_of(specimen, meta)
    assert all(output.is_meta for output in outputs)
    assert_alike(outputs, outputs_of(specimen, real))
    torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    for name, tensor in meta.items():
        assert not real[name].requires_grad or tensor.grad.shape == real[name].shape


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_fake_tensors(specimen: Specimen, device: torch.device) -> None:
    real = specimen.inputs(torch.bfloat16, device)
    with FakeTensorMode() as mode:
        outputs = outputs_of(specimen, {n: mode.from_tensor(t) for n, t in real.items()})
    assert all(output.device.type == device.type for output in outputs)
    assert_alike(outputs, outputs_of(specimen, real))


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_lazy_negation_is_resolved(specimen: Specimen, device: torch.device) -> None:
    """The imaginary part of a conjugate is a view that torch negates when it is read."""
    inputs = specimen.inputs(torch.float32, device)
    negated = {}
    for name, t in inputs.items():
        if t.is_floating_point():
            negated[name] = torch.complex(torch.zeros_like(t), -t).conj().imag
            assert negated[name].is_neg()
    leaves = {n: t.detach().requires_grad_() for n, t in negated.items()}
    outputs = outputs_of(specimen, {**inputs, **leaves})
    for ours, theirs in zip(outputs, outputs_of(specimen, inputs), strict=True):
        torch.testing.assert_close(ours, theirs)
    upstream = [torch.complex(torch.zeros_like(o), -torch.ones_like(o)).conj().imag for o in outputs]
    plain = {n: inputs[n].requires_grad_() for n in leaves}
    expected_outputs = outputs_of(specimen, {**inputs, **plain})
    expected = torch.autograd.grad(
        expected_outputs, list(plain.values()), [torch.ones_like(o) for o in outputs]
    )
    for ours, theirs in zip(
        torch.autograd.grad(outputs, list(leaves.values()), upstream), expected, strict=True
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_zero_tensors_as_upstream_gradients(specimen: Specimen, device: torch.device) -> None:
    """torch's tensors of zeros that have no memory."""
    inputs = specimen.inputs(torch.float32, device)
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items() if t.is_floating_point()}
    outputs = outputs_of(specimen, {**inputs, **leaves})
    zeros = [torch._efficientzerotensor(o.shape, dtype=o.dtype, device=o.device) for o in outputs]
    for gradient in torch.autograd.grad(outputs, list(leaves.values()), zeros):
        assert gradient.count_nonzero() == 0


class Subclass(Tensor):
    """A subclass without a dispatch of its own."""


@pytest.mark.parametrize("specimen", ONE_EACH, ids=name_of)
def test_plain_subclasses_and_parameters(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    expected = outputs_of(specimen, inputs)
    for wrap in (lambda t: t.as_subclass(Subclass), torch.nn.Parameter, torch.nn.Buffer):
        wrapped = {n: wrap(t) if t.is_floating_point() else t for n, t in inputs.items()}
        for ours, theirs in zip(outputs_of(specimen, wrapped), expected, strict=True):
            assert torch.equal(ours.detach().as_subclass(Tensor), theirs)


class Wrapper(Tensor):
    """A subclass whose memory is another tensor's, like the subclasses for quantised or sharded weights."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"{func} is not implemented for {cls.__name__}")


class Leaky(Wrapper):
    """A subclass that hands itself to the kernel."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_wrapper_subclasses_are_never_read(specimen: Specimen, device: torch.device) -> None:
    inputs = specimen.inputs(torch.float32, device)
    for name, tensor in inputs.items():
        with pytest.raises(NotImplementedError, match="is not implemented for Wrapper"):
            outputs_of(specimen, {**inputs, name: Wrapper(tensor)})
        with pytest.raises((TypeError, RuntimeError)):
            outputs_of(specimen, {**inputs, name: Leaky(tensor)})


@pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")
@pytest.mark.parametrize("specimen", WITH_OPS, ids=name_of)
def test_a_dtensor_beside_plain_tensors_raises(specimen: Specimen) -> None:
    """By the argument's name. What takes DTensors alone is in tests/distributed/test_dtensor.py."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        inputs = specimen.inputs(torch.float32, torch.device("cpu"))
        for name, tensor in inputs.items():
            sharded = distribute_tensor(tensor, mesh, [Shard(0)])
            with pytest.raises(TypeError, match=r"expected a .*placements") as error:
                outputs_of(specimen, {**inputs, name: sharded})
            assert specimen.operator in str(error.value) and "to_local()" in str(error.value)
    finally:
        dist.destroy_process_group()


def test_nested_tensors_raise(device: torch.device) -> None:
    rows = [torch.randn(n, 8, device=device) for n in (3, 5)]
    w1, w2 = torch.randn(16, 8, device=device), torch.randn(8, 16, device=device)
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match="x: expected a dense"):
            mr.mlp(torch.nested.nested_tensor(rows, layout=layout), w1, w2)


def test_sparse_and_quantised_tensors_raise(device: torch.device) -> None:
    x = torch.eye(8, device=device)
    for sparse in (x.to_sparse(), x.to_sparse_csr()):
        with pytest.raises(TypeError, match="x: expected a dense"):
            mr.mlp(sparse, x, x)
        with pytest.raises(TypeError, match="w2: expected a dense"):
            mr.mlp(x, x, sparse)
    with pytest.raises(TypeError, match="w1: expected float64, float32, bfloat16 or float16"):
        mr.mlp(x.cpu(), torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.qint8), x.cpu())
