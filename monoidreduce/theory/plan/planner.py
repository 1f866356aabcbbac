"""A training step of a whole transformer on a mesh: what is trained, and how it is shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from math import ceil

from monoidreduce._validate import check_bool, check_choice, check_int, mismatch
from monoidreduce.theory.plan._positive import check_counts, check_numbers
from monoidreduce.theory.plan.layer import RECOMPUTE, Layer
from monoidreduce.theory.plan.memory import Memory, memory_of
from monoidreduce.theory.plan.mesh import STRATEGIES, Mesh
from monoidreduce.theory.plan.on_chip import Taken, check_operators, operators_of
from monoidreduce.theory.plan.pipeline import SCHEDULES
from monoidreduce.theory.plan.rates import Rates, rates_of
from monoidreduce.theory.plan.report import table
from monoidreduce.theory.plan.step import Step, step_of
from monoidreduce.theory.plan.topology import PODS, is_slice
from monoidreduce.theory.plan.transformer import Model

__all__ = ["OVERLAP", "Batch", "Dispatch", "Plan", "Precision"]

DAY = 86400
OVERLAP = ("dp", "fsdp", "context", "pipeline")


@dataclass(frozen=True)
class Batch:
    """The tokens of a step, in sequences of `sequence` tokens.

    microbatch: sequences of a replica in one forward pass; None for one sequence with a pipeline, all
    without.

    Raises TypeError or ValueError unless all are positive.
    """

    tokens: float
    sequence: float
    microbatch: float | None = None

    def __post_init__(self) -> None:
        check_numbers(tokens=self.tokens, sequence=self.sequence)
        if self.microbatch is not None:
            check_numbers(microbatch=self.microbatch)


@dataclass(frozen=True)
class Precision:
    """Bytes per parameter.

    Attributes:
        weights: in products, and as FSDP and ZeRO gather them.
        gradients: as they are summed over microbatches.
        optimizer: optimizer state; the default is a float32 copy of the weight and Adam's two moments.
        sent: gradients, as chips send them.
        float8: products of layers have 8-bit operands.
    """

    weights: float = 2
    gradients: float = 4
    optimizer: float = 12
    sent: float = 4
    float8: bool = False

    def __post_init__(self) -> None:
        check_numbers(
            weights=self.weights, gradients=self.gradients, optimizer=self.optimizer, sent=self.sent
        )
        check_bool("float8", self.float8)

    @property
    def updated(self) -> float:
        """Bytes that an update moves: state is read and written, gradients read, weights written."""
        return 2 * self.optimizer + self.gradients + self.weights


@dataclass(frozen=True)
class Dispatch:
    """How tokens reach the experts of other chips, and how a chip's experts are computed.

    Attributes:
        bytes: of an element of a token that is sent to an expert; results come back in two.
        by_node: a token crosses the network once for each node with experts that it chose, as by DeepEP;
            otherwise once for each of these experts.
        grouped: the products of a chip's experts are one kernel. Otherwise each expert has its own, which the
            host launches when it knows how many tokens each expert has.

    Raises TypeError or ValueError for values of other kinds.
    """

    bytes: float = 2
    by_node: bool = True
    grouped: bool = True

    def __post_init__(self) -> None:
        check_numbers(bytes=self.bytes)
        for name in ("by_node", "grouped"):
            check_bool(name, getattr(self, name))


@dataclass(frozen=True)
class Plan:
    """A training step of `model` on `mesh`, as the slowest chip executes it.

    What each strategy shards and sends:

    - dp: tokens. Gradients are all-reduced once a step.
    - fsdp: tokens and state, the state also between the chips of context. Weights are all-gathered in both
      phases, gradients reduce-scattered; with a pipeline once a step.
    - tp: heads, hidden widths and classes. Activations are all-reduced twice per layer and phase.
    - vocab: classes of head and embedding; its chips compute the layers redundantly.
    - context: sequences. Keys and values are all-gathered in both phases, their gradients reduce-scattered.
    - pipeline: layers. Activations are sent to the next stage.
    - expert: tokens, and the experts of a layer. Tokens are sent to their experts and back.

    Attributes:
        model, batch, mesh: what is trained, on which chips.
        precision: bytes per parameter.
        dispatch: how tokens reach their experts.
        recompute: what backward runs again: "none", "attention" (its core, if scores are stored),
            "alternate" (every second product, and all that is cheap), "full" (layers, of which the input
            alone is kept).
        sequence_parallel: the chips of a tp group share norms, residuals and their activations.
        overlap: strategies whose collectives run beside arithmetic.
        zero: 0, or what replicas along dp, context and expert share: 1 the optimizer's state, 2 also
            gradients, which are then sent every microbatch.
        schedule: of a pipeline: "1f1b", "gpipe" or "dualpipe".
        chunks: parts of the model on each chip of a pipeline; more than one interleave.
        stored_scores: attention stores its scores.
        dropout: masks of dropout are kept.
        fused_loss: the loss makes no copies of logits in float32.
        cost: attention, feedforward layers and the loss are this library's: their times are those of
            `mr.cost`, and neither hidden values nor logits are stored.
        rates: fractions of published rates; None for those that runs on this hardware reach (`rates_of`).

    Raises TypeError or ValueError for values that are not as above, if the tp chips do not divide the heads
    and the hidden width, if stages are more than layers, or if `cost` is set and `mr.cost` does not know the
    chip.
    """

    model: Model
    batch: Batch
    mesh: Mesh
    precision: Precision = field(default_factory=Precision)
    dispatch: Dispatch = field(default_factory=Dispatch)
    recompute: str = "none"
    sequence_parallel: bool = True
    overlap: tuple[str, ...] = OVERLAP
    zero: int = 0
    schedule: str = "1f1b"
    chunks: int = 1
    stored_scores: bool = False
    dropout: bool = False
    fused_loss: bool = False
    cost: bool = False
    rates: Rates | None = None

    def __post_init__(self) -> None:
        check_choice("recompute", self.recompute, RECOMPUTE)
        check_choice("schedule", self.schedule, SCHEDULES)
        for name in ("sequence_parallel", "stored_scores", "dropout", "fused_loss", "cost"):
            check_bool(name, getattr(self, name))
        for strategy in self.overlap:
            check_choice("overlap", strategy, STRATEGIES)
        if check_int("zero", self.zero, "0, 1 or 2") not in (0, 1, 2):
            raise ValueError(mismatch("zero", "0, 1 or 2", self.zero))
        check_counts(chunks=self.chunks)
        model, tp, stages = self.model, self.mesh.size("tp"), self.mesh.size("pipeline")
        if self.cost:
            check_operators(self.mesh.hardware)
            if model.experts or model.latent or stages > 1:
                raise ValueError(mismatch("cost", "a dense model without a pipeline", self.cost))
        for name, size in (("heads", model.heads), ("hidden", model.hidden)):
            if size % tp:
                raise ValueError(mismatch("tp", f"a divisor of {name} {size}", tp))
        if stages * self.chunks > model.layers:
            expected = f"at most the {model.layers} layers in stages and chunks"
            raise ValueError(mismatch("pipeline", expected, f"{stages} x {self.chunks}"))
        experts = self.mesh.size("expert")
        if experts > 1 and (model.experts is None or model.experts.count % experts):
            expected = f"a divisor of the experts, {model.experts.count if model.experts else 0}"
            raise ValueError(mismatch("expert", expected, experts))

    @property
    def reached(self) -> Rates:
        """The fractions of published rates that count."""
        return self.rates or rates_of(self.mesh.hardware)

    # What a chip computes

    @property
    def replicas(self) -> int:
        """Parts of the batch that different chips compute at the same time."""
        return self.mesh.size("dp", "fsdp", "expert")

    @property
    def microbatch(self) -> float:
        """Sequences of a replica in one forward pass."""
        sequences = self.batch.tokens / self.batch.sequence / self.replicas
        if self.batch.microbatch is None:
            return min(sequences, 1) if self.mesh.size("pipeline") > 1 else sequences
        return min(self.batch.microbatch, sequences)

    @property
    def microbatches(self) -> int:
        """Forward and backward passes of a step."""
        passes = self.batch.tokens / self.batch.sequence / self.replicas / self.microbatch
        return max(ceil(passes - 1e-9), 1)

    @property
    def microbatch_tokens(self) -> float:
        """Tokens that a chip computes in one forward pass. All chips along tp and vocab compute the same
        tokens."""
        return self.microbatch * self.batch.sequence / self.mesh.size("context")

    @property
    def tokens(self) -> float:
        """Tokens that a chip computes in a step."""
        return self.batch.tokens / self.replicas / self.mesh.size("context")

    @property
    def stages(self) -> tuple[tuple[tuple[tuple[Layer, float], ...], bool], ...]:
        """The stages that may be the longest: their layers by kind, and whether the head is among them.

        Where stages do not divide the layers, the last stage is one of the shorter ones.
        """
        stages = self.mesh.size("pipeline")
        layers, rest = divmod(self.model.layers, stages)
        if stages == 1:
            return ((self._kinds(layers), True),)
        return ((self._kinds(layers + bool(rest)), False), (self._kinds(layers), True))

    @property
    def stage_layers(self) -> tuple[tuple[Layer, float], ...]:
        """The kinds of layers of the stage with most layers, and how many there are of each."""
        return self.stages[0][0]

    def _kinds(self, layers: int) -> tuple[tuple[Layer, float], ...]:
        dense = self.model.dense_layers / self.model.layers
        kinds = ((False, dense), (True, 1 - dense))
        return tuple((self._layer(sparse), layers * share) for sparse, share in kinds if share)

    def _layer(self, sparse: bool) -> Layer:
        return Layer(
            self.model,
            sparse,
            self.microbatch_tokens,
            self.batch.sequence,
            self.mesh.size("tp"),
            self.mesh.size("expert"),
            self.sequence_parallel,
            self.stored_scores,
            self.dropout,
        )

    def kept(self, layer: Layer) -> float:
        """Bytes of activations that a layer keeps for backward."""
        if self.cost and self.recompute != "full":
            return layer.kept_by_folds()
        return layer.kept(self.recompute)

    @property
    def chip_parameters(self) -> float:
        """Parameters of the fullest chip, counting FSDP's as gathered: a stage, and embedding or head."""
        blocks = sum(count * layer.parameters for layer, count in self.stage_layers)
        ends = 1 if self.model.tied or self.mesh.size("pipeline") > 1 else 2
        return blocks + ends * self.model.head_parameters / self.mesh.size("tp", "vocab")

    @property
    def expert_parameters(self) -> float:
        """Those of `chip_parameters` that are of routed experts."""
        return sum(count * layer.expert_parameters for layer, count in self.stage_layers)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The strategies whose chips share all state: FSDP's, and the context's beside it."""
        return ("fsdp", "context") if any(axis.strategy == "fsdp" for axis in self.mesh.axes) else ()

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """The strategies whose chips have the same weights, outside of `state_axes`."""
        return tuple(name for name in ("dp", "context", "expert") if name not in self.state_axes)

    @property
    def state_chips(self) -> int:
        """Number of chips that share all state."""
        return self.mesh.size(*self.state_axes)

    @property
    def owned_parameters(self) -> float:
        """Parameters whose optimizer state the chip has."""
        experts = self.expert_parameters
        shared = self.chip_parameters - experts
        if self.zero:
            replicas = self.mesh.size(*self.replica_axes)
            shared, experts = shared / replicas, experts * self.mesh.size("expert") / replicas
        return (shared + experts) / self.state_chips

    @cached_property
    def operators(self) -> dict[str, Taken]:
        """Costs of a layer's operators and of the loss, by name; empty without `cost`."""
        if not self.cost:
            return {}
        return operators_of(self.model, self.mesh, self.microbatch_tokens, self.batch.sequence)

    # What comes of it

    @cached_property
    def step(self) -> Step:
        """The step, part by part."""
        return step_of(self)

    @cached_property
    def memory(self) -> Memory:
        """What the fullest chip holds."""
        return memory_of(self)

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all chips together."""
        return self.batch.tokens / self.step_seconds

    @property
    def mfu(self) -> float:
        """MFU of the step (equation 3). What runs again, and masked scores, do not count as useful FLOPs."""
        tokens, length = self.batch.tokens, self.batch.sequence
        useful = self.model.gemm_flops(tokens) + self.model.attention_flops(tokens, length)
        return useful / (self.mesh.chips * self.mesh.hardware.peak * self.step_seconds)

    def days(self, tokens: float) -> float:
        """Days to train on this many tokens."""
        check_numbers(tokens=tokens)
        return tokens / self.tokens_per_second / DAY

    @property
    def notes(self) -> tuple[str, ...]:
        """Reasons why the plan cannot be carried out as it is."""
        found = []
        if self.batch.tokens < self.replicas * self.batch.sequence:
            found.append(
                f"{self.batch.tokens / self.batch.sequence:.0f} sequences of {self.batch.sequence:g} tokens "
                f"for {self.replicas} shards of the batch: shorten them, or shard them too (context)"
            )
        hardware = self.mesh.hardware
        if (pod := PODS.get(hardware.name)) and not is_slice(self.mesh.joined, pod):
            shape, cube = (" x ".join(map(str, sizes)) for sizes in pod)
            found.append(
                f"{self.mesh.joined} chips are no slice of {hardware.name}: cubes of {cube} in a pod of "
                f"{shape}"
            )
        for axis in self.mesh.axes:
            if self.mesh.is_torus and 1 < axis.size < 2 ** int(axis.physical):
                found.append(f"{axis.strategy}: {axis.size} chips do not lie along {axis.links:g} axes")
        if self.memory.total > hardware.memory:
            found.append(
                f"{self.memory.total:.3g} bytes a chip, where {hardware.name} has {hardware.memory:.3g}"
            )
        return tuple(found)

    def __str__(self) -> str:
        """The mesh, the step part by part, and memory."""
        return table(self)
