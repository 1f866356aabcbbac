"""Planning a training run: rooflines, collectives, parallel strategies and batch sizes.

The formulas are from the paper "Rooflines and Scaling"; each names its equation, table or appendix. All
numbers are in plain FLOPs, bytes, seconds and tokens, without prefixes. docs/planner.md has worked examples.
"""

from monoidreduce.theory.hardware import HARDWARE, NETWORKS, Hardware, Link
from monoidreduce.theory.plan.collectives import Ring, ring, seconds, sent
from monoidreduce.theory.plan.critical_batch import (
    Pareto,
    QuadraticModel,
    Schedule,
    batch_schedule,
    covariance_preserving_rate,
    estimate_noise,
    fit_pareto,
    linear_rate,
)
from monoidreduce.theory.plan.fsdp_tp import (
    ShardedLayer,
    least_communication_seconds,
    least_tokens_per_chip,
    optimal_fsdp_chips,
    sharded_layers,
)
from monoidreduce.theory.plan.links import Send
from monoidreduce.theory.plan.memory import Memory
from monoidreduce.theory.plan.mesh import Axis, Mesh, meshes
from monoidreduce.theory.plan.models import MODELS, model_of
from monoidreduce.theory.plan.noise_scale import NoiseScale
from monoidreduce.theory.plan.one_device import (
    Footprint,
    attention_backward,
    attention_forward,
    fused_mlp,
    gemm,
    launch_overhead,
    linear_backward,
    linear_forward,
    naive_attention_forward,
    naive_gemm,
    stored_mlp,
)
from monoidreduce.theory.plan.operators import context_parallel, hidden_parallel, vocabulary_parallel
from monoidreduce.theory.plan.planner import Batch, Dispatch, Plan, Precision
from monoidreduce.theory.plan.published import RUNS
from monoidreduce.theory.plan.ranks import SPLITS, OverRanks, over_ranks, splits
from monoidreduce.theory.plan.rates import IDEAL, Rates, rates_of
from monoidreduce.theory.plan.report import as_dict
from monoidreduce.theory.plan.roofline import Roofline, Work, interconnect, on_device
from monoidreduce.theory.plan.runs import Run
from monoidreduce.theory.plan.search import Proposals, best, plans, propose
from monoidreduce.theory.plan.shards import RankPass
from monoidreduce.theory.plan.step import Step, Times
from monoidreduce.theory.plan.strategies import (
    Phases,
    data_parallel,
    fully_sharded,
    least_hidden,
    tensor_parallel,
)
from monoidreduce.theory.plan.tensor_lines import Algorithm, Line, all_gather_version, all_reduce_version
from monoidreduce.theory.plan.topology import check_slice, logical_strides
from monoidreduce.theory.plan.transformer import Experts, Latent, Model, training_flops, training_seconds

__all__ = [
    "HARDWARE",
    "IDEAL",
    "MODELS",
    "NETWORKS",
    "RUNS",
    "SPLITS",
    "Algorithm",
    "Axis",
    "Batch",
    "Dispatch",
    "Experts",
    "Footprint",
    "Hardware",
    "Latent",
    "Line",
    "Link",
    "Memory",
    "Mesh",
    "Model",
    "NoiseScale",
    "OverRanks",
    "Pareto",
    "Phases",
    "Plan",
    "Precision",
    "Proposals",
    "QuadraticModel",
    "RankPass",
    "Rates",
    "Ring",
    "Roofline",
    "Run",
    "Schedule",
    "Send",
    "ShardedLayer",
    "Step",
    "Times",
    "Work",
    "all_gather_version",
    "all_reduce_version",
    "as_dict",
    "attention_backward",
    "attention_forward",
    "batch_schedule",
    "best",
    "check_slice",
    "context_parallel",
    "covariance_preserving_rate",
    "data_parallel",
    "estimate_noise",
    "fit_pareto",
    "fully_sharded",
    "fused_mlp",
    "gemm",
    "hidden_parallel",
    "interconnect",
    "launch_overhead",
    "least_communication_seconds",
    "least_hidden",
    "least_tokens_per_chip",
    "linear_backward",
    "linear_forward",
    "linear_rate",
    "logical_strides",
    "meshes",
    "model_of",
    "naive_attention_forward",
    "naive_gemm",
    "on_device",
    "optimal_fsdp_chips",
    "over_ranks",
    "plans",
    "propose",
    "rates_of",
    "ring",
    "seconds",
    "sent",
    "sharded_layers",
    "splits",
    "stored_mlp",
    "tensor_parallel",
    "training_flops",
    "training_seconds",
    "vocabulary_parallel",
]
