"""The fused loss where tensor parallelism splits the classes of a model's head: as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import on_ranks
from torch import Tensor

transformers = pytest.importorskip("transformers", minversion="5.4")

from monoidreduce.integrations.transformers import apply  # noqa: E402

CONFIG: dict[str, Any] = {
    "vocab_size": 301,  # which no number of ranks divides
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "untied": ("Llama", {"tie_word_embeddings": False}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "bias": ("Phi", {"tie_word_embeddings": False}),
    "capped": ("Gemma2", {"tie_word_embeddings": False, "final_logit_softcapping": 3.0}),
}


def _made(name: str) -> Any:
    family, own = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**CONFIG, **own}, attn_implementation="eager")
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(config).double().train()


def _batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 301, (2, 12), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[1, 3:5] = -100
    return {"input_ids": ids, "labels": labels}


def _whole(t: Any) -> Tensor:
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def _gradients(model: Any, loss: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss.backward()
    grads = {name: _whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return _whole(loss.detach()), grads


Step = tuple[Tensor, dict[str, Tensor]]


def _expected(model: Any) -> list[Step]:
    """Of the model's logits, in float64: the mean, and a sum over a number of items."""
    inputs, found = _batch(), []
    for items in (None, 7):
        logits = model(inputs["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = F.cross_entropy(
            logits, inputs["labels"][:, 1:].flatten(), reduction="sum" if items else "mean"
        )
        found.append(_gradients(model, loss / (items or 1)))
    return found


def _found(model: Any) -> list[Step]:
    given: tuple[dict[str, Any], ...] = ({}, {"num_items_in_batch": torch.tensor(7)})
    return [_gradients(model, model(**_batch(), **options).loss) for options in given]


def _compare(found: list[Step], expected: list[Step]) -> None:
    for (loss, grads), (of_one, grads_of_one) in zip(found, expected, strict=True):
        torch.testing.assert_close(loss, of_one, rtol=1e-7, atol=0)  # norms are in float32
        assert grads.keys() == grads_of_one.keys()
        for name, grad in grads_of_one.items():
            torch.testing.assert_close(grads[name], grad, rtol=1e-5, atol=1e-7, msg=name)


def _loaded(group: Any, folder: str) -> tuple[list[Step], int]:
    """A model that transformers splits over all ranks; and how many classes this one has."""
    from transformers.distributed import DistributedConfig

    split = {"distributed_config": DistributedConfig(tp_plan="auto", tp_size=4)}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **split)
    model = apply(model.train(), attention=False)
    return _found(model), len(model.lm_head.weight.to_local())


@pytest.mark.parametrize("name", ("untied", "tied", "capped"))
def test_a_model_that_transformers_splits(name: str, tmp_path: Path) -> None:
    model = _made(name)
    model.save_pretrained(tmp_path)
    expected = _expected(model)
    for rank, (found, classes) in enumerate(on_ranks(4, _loaded, str(tmp_path))):
        assert classes == (76, 76, 76, 73)[rank]
        _compare(found, expected)


def _styled(group: Any, name: str, style: str) -> Any:
    """A model whose head has one of torch's styles."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleOutput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    model = _made(name)
    mesh = DeviceMesh.from_group(group, "cpu")
    plans: dict[str, dict[str, Any]] = {
        "replicated": {"lm_head": ColwiseParallel(output_layouts=Replicate())},
        "placed": {"lm_head": ColwiseParallel(use_local_output=False)},
        "sequence parallel": {
            "model.layers.1": PrepareModuleOutput(
                output_layouts=Replicate(), desired_output_layouts=Shard(1)
            ),
            "model.norm": SequenceParallel(),
            "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        "rows": {"lm_head": RowwiseParallel(input_layouts=Replicate())},
    }
    parallelize_module(model, mesh, plans[style])
    model = apply(model, attention=False)
    found = _found(model)
    return found if style != "rows" else (found, model._fused_loss.given_up)


@pytest.mark.parametrize(
    "name, style",
    (
        ("untied", "replicated"),
        ("bias", "replicated"),
        ("capped", "replicated"),
        ("untied", "placed"),
        ("untied", "sequence parallel"),
    ),
)
def test_a_head_with_a_style_of_torch(name: str, style: str) -> None:
    expected = _expected(_made(name))
    for found in on_ranks(2, _styled, name, style):
        _compare(found, expected)


def test_a_head_whose_width_is_split() -> None:
    """Its loss is left to transformers, which computes it in float32."""
    expected = _expected(_made("untied"))
    for found, reason in on_ranks(2, _styled, "untied", "rows"):
        assert reason.startswith("lm_head.weight: expected a DTensor with Shard(0) on one dimension")
        assert "Shard(dim=1)" in reason
        for (loss, _), (of_one, _) in zip(found, expected, strict=True):
            torch.testing.assert_close(loss.double(), of_one, rtol=2e-6, atol=0)


def _with_fsdp(group: Any) -> Step:
    """Rows of ranks have other sequences; within one the classes are split."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = _made("untied")
    parallelize_module(model.lm_head, mesh["tensor"], ColwiseParallel(output_layouts=Replicate()))
    for part in (*model.model.layers, model.lm_head, model):
        fully_shard(part, mesh=mesh["data"])
    model = apply(model, attention=False)
    row = mesh["data"].get_local_rank()
    own = {key: t[row : row + 1] for key, t in _batch().items()}
    loss, grads = _gradients(model, model(**own, num_items_in_batch=torch.tensor(7)).loss)
    dist.all_reduce(loss, group=mesh["data"].get_group())
    return loss, {name: 2 * grad for name, grad in grads.items()}  # FSDP takes the mean


def test_fsdp_and_tensor_parallelism() -> None:
    expected = _expected(_made("untied"))[1:]
    for found in on_ranks(4, _with_fsdp):
        _compare([found], expected)
