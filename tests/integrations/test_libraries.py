"""verl, Megatron-LM and torchtitan themselves, with the functions that are for them and as they are.

Each is imported in a process of its own, from this environment or its folder `libraries`, which `make test`
fills.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.release

FOLDER = Path(sys.prefix) / "libraries"

# On a CPU, within 1e-6 of the largest value.
COMPARE = """
import copy, warnings
import torch

warnings.simplefilter("ignore")


def near(found, expected):
    assert len(found) == len(expected) > 1
    for ours, theirs in zip(found, expected, strict=True):
        assert theirs is not None and theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6 * max(1, float(theirs.abs().max())))


def gradients(model):
    return [p.grad for p in model.parameters()]
"""


def run_with(library: str, code: str) -> None:
    """Runs code that compares; skips without the library."""
    path = [os.environ.get("PYTHONPATH", ""), str(FOLDER)]
    if importlib.util.find_spec(library) is None and not (FOLDER / library).is_dir():
        pytest.skip(f"no {library}: make .venv/libraries.done")
    found = subprocess.run(
        [sys.executable, "-c", COMPARE + code + "\nprint('compared')"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0 and found.stdout.endswith("compared\n"), found.stderr[-4000:]


VERL = """
import verl.utils.kernel.linear_cross_entropy as of_verl
from transformers import LlamaConfig, LlamaForCausalLM
from verl.models.transformers import dense_common

from monoidreduce.integrations.verl import linear_cross_entropy

of_verl.linear_cross_entropy = linear_cross_entropy
sizes = dict(vocab_size=301, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
torch.manual_seed(0)
theirs = LlamaForCausalLM(LlamaConfig(**sizes))
ours = copy.deepcopy(theirs)
ids = torch.randint(301, (2, 20))
upstream = torch.randn(2, 40)
results = []
for model, backend in (
    (ours, dense_common.forward_with_triton_backend), (theirs, dense_common.forward_with_torch_backend)
):
    out = backend(model, input_ids=ids, temperature=0.7, return_dict=True)
    log_probs, entropy = out.log_probs.flatten(), out.entropy.flatten()
    (log_probs @ upstream[0] + entropy @ upstream[1]).backward()
    results.append([log_probs.detach(), entropy.detach(), *gradients(model)])
near(*results)
"""


def test_verl() -> None:
    """A model of transformers whose forward is verl's: its fused kernel, replaced, and its torch backend."""
    run_with("verl", VERL)


# Megatron keeps buffers and random numbers on a GPU, except where it is told otherwise.
MEGATRON = """
import contextlib, os, sys, types
import torch.distributed as dist

torch.cuda.current_device = lambda: "cpu"

from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

from monoidreduce.integrations.megatron import linear_cross_entropy, vocab_parallel_linear_cross_entropy

tensor_parallel.get_cuda_rng_tracker = lambda: types.SimpleNamespace(fork=contextlib.nullcontext)


class FusedGPTModel(GPTModel):
    def _postprocess(self, hidden_states, input_ids, position_ids, labels, *args, **options):
        if labels is None or not self.post_process:
            return super()._postprocess(hidden_states, input_ids, position_ids, labels, *args, **options)
        weight = self.output_layer.weight
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        group, own_rows = self.pg_collection.tp, self.config.sequence_parallel
        return vocab_parallel_linear_cross_entropy(
            hidden_states, weight, labels, group, sequence_parallel=own_rows
        )


def of_rank(rank, size, file, shared):
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, tensor_model_parallel_size=size,
        use_cpu_initialization=True, attention_dropout=0.0, hidden_dropout=0.0, add_bias_linear=False,
    )
    arguments = dict(
        vocab_size=304, max_sequence_length=20, position_embedding_type="learned_absolute",
        share_embeddings_and_output_weights=shared,
    )
    made = []
    for kind in (FusedGPTModel, GPTModel):
        torch.manual_seed(0)
        made.append(kind(config, get_gpt_layer_local_spec(), **arguments))
    torch.manual_seed(1)
    ids, labels = torch.randint(304, (2, 2, 20))
    positions, mask = torch.arange(20).expand(2, 20), torch.ones(20, 20).triu(1).bool()[None, None]
    upstream = torch.randn(2, 20)
    results = []
    for model in made:
        loss = model(ids, positions, mask, labels=labels)
        assert loss.shape == (2, 20)
        (loss * upstream).sum().backward()
        results.append([loss.detach(), *gradients(model)])
    near(*results)
    dist.destroy_process_group()
"""

IN_RANKS = """
if __name__ == "__main__":
    import tempfile

    import torch.multiprocessing as mp

    for size, shared in ((1, True), (2, False)):
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(of_rank, (size, folder + "/ranks", shared), nprocs=size, start_method="fork")
"""


def test_megatron() -> None:
    """Its GPTModel, on one rank with tied embeddings, and with the classes on two."""
    run_with("megatron", MEGATRON + IN_RANKS)


# Its package of expert parallelism imports Triton, which comes with CUDA. Its attention runs on a GPU alone.
TORCHTITAN = """
import sys
from dataclasses import dataclass
from unittest.mock import MagicMock

import torchtitan.distributed

sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()
from torchtitan.components.loss import IGNORE_INDEX, ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.llama3 import llama3_configs

import monoidreduce as mr
from monoidreduce.integrations.torchtitan import LinearCrossEntropyLoss


class FusedLoss(LinearCrossEntropyLoss, ChunkedLossWrapper):
    @dataclass(kw_only=True, slots=True)
    class Config(ChunkedLossWrapper.Config):
        pass


config = llama3_configs["debugmodel"]("flex")
config.layers = []
torch.manual_seed(0)
model = config.build()
model.init_states()
chunked, ours = copy.deepcopy(model), copy.deepcopy(model)
width, classes = model.lm_head.weight.shape[::-1]
ours.lm_head = mr.nn.LinearCrossEntropyHead(width, classes, reduction="sum")
ours.lm_head.weight.data.copy_(model.lm_head.weight.data)

tokens, labels = torch.randint(classes, (2, 2, 16))
labels[0, :5] = IGNORE_INDEX
number = (labels != IGNORE_INDEX).sum()
results = []
for of, loss in (
    (ours, FusedLoss.Config().build()),
    (chunked, ChunkedLossWrapper.Config(num_chunks=4).build()),
    (model, CrossEntropyLoss.Config().build()),
):
    if isinstance(loss, ChunkedLossWrapper):  # as torchtitan's trainer does
        loss.set_lm_head(of.lm_head)
        of._skip_lm_head = True
    value, metrics = loss(of(tokens), labels, number)
    value.backward()
    results.append([value.detach(), *gradients(of)])
    assert metrics == {}
near(results[0], results[1])
near(results[0], results[2])
"""


def test_torchtitan() -> None:
    """A Llama of torchtitan without layers: its chunked loss, its loss of logits, and ours in their place."""
    run_with("torchtitan", TORCHTITAN)
