"""A training step of a whole transformer on a mesh, from the formulas of the other files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from monoidreduce._validate import check_bool, mismatch
from monoidreduce.theory.hardware import Hardware
from monoidreduce.theory.plan._positive import check_numbers
from monoidreduce.theory.plan.collectives import sent
from monoidreduce.theory.plan.mesh import Mesh, meshes
from monoidreduce.theory.plan.on_chip import Taken, check_operators, operators_of
from monoidreduce.theory.plan.operators import STATE_BYTES
from monoidreduce.theory.plan.roofline import Work
from monoidreduce.theory.plan.strategies import Phases
from monoidreduce.theory.plan.topology import PODS, is_slice
from monoidreduce.theory.plan.transformer import Model

__all__ = ["Batch", "Memory", "Plan", "Precision", "best", "plans"]

DAY = 86400


@dataclass(frozen=True)
class Batch:
    """The tokens of a step, in sequences of `sequence` tokens. Both must be positive."""

    tokens: float
    sequence: float

    def __post_init__(self) -> None:
        check_numbers(tokens=self.tokens, sequence=self.sequence)


@dataclass(frozen=True)
class Precision:
    """Bytes per element.

    Attributes:
        weights, activations, gradients: in arithmetic and communication.
        optimizer: optimizer state per parameter; the default is a float32 copy and Adam's two moments.
    """

    weights: float = 2
    activations: float = 2
    gradients: float = 2
    optimizer: float = 12

    def __post_init__(self) -> None:
        check_numbers(
            weights=self.weights,
            activations=self.activations,
            gradients=self.gradients,
            optimizer=self.optimizer,
        )


@dataclass(frozen=True)
class Memory:
    """Bytes that a chip holds during a step.

    Attributes:
        weights, gradients, optimizer: for the parameters that the chip owns.
        gathered: FSDP's gathered weights of the largest layer, the least that section 2.3 allows.
        activations: saved for backward; with remat, one input per layer. Hidden values of feedforward layers,
            scores and logits are not counted, because this library's operators do not store them.
        workspace: peak scratch memory of one of these operators, by `mr.cost`; 0 if the plan has cost=False.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float
    activations: float
    workspace: float = 0

    @property
    def total(self) -> float:
        state = self.weights + self.gradients + self.optimizer
        return state + self.gathered + self.activations + self.workspace


@dataclass(frozen=True)
class Plan:
    """A training step of `model` on `mesh`, as one chip executes it (sections 1.4 and 2).

    Matrix products and causal attention are counted; their traffic to the chip's own memory is not (footnote
    4). The axes communicate independently of each other, overlapped with arithmetic as far as that lasts.
    What each strategy shards and sends:

    - dp: tokens. Gradients are all-reduced.
    - fsdp: tokens and state. Weights are all-gathered in both phases, gradients reduce-scattered.
    - tp: heads, hidden widths and classes. Activations are all-reduced twice per layer and phase; for the
      classes it also sends what vocab does.
    - vocab: classes of head and embedding; its chips compute the layers redundantly. Activations are
      all-reduced once per phase, and in forward also the loss's states.
    - context: sequences. Keys and values are all-gathered in both phases, their gradients reduce-scattered,
      and gradients of weights all-reduced.

    Attributes:
        model, batch, mesh: what is trained, on which chips.
        precision: bytes per element.
        mfu: the fraction of peak FLOP/s that arithmetic alone reaches, above 0 and at most 1.
        remat: layers run again in backward, with their all-reduces; only their inputs are saved.
        cost: take the times of attention, feedforward layers and the loss from `mr.cost` for the chip's part
            of them. Then mfu concerns the other products, and memory includes the workspace of these
            operators.

    Raises TypeError or ValueError if mfu is out of range, if the tp chips do not divide the heads and the
    hidden width, or if `cost` is set and `mr.cost` does not know the chip or the bytes of activations.
    """

    model: Model
    batch: Batch
    mesh: Mesh
    precision: Precision = field(default_factory=Precision)
    mfu: float = 1.0
    remat: bool = False
    cost: bool = False

    def __post_init__(self) -> None:
        check_bool("remat", self.remat)
        if check_bool("cost", self.cost):
            check_operators(self.mesh.hardware, self.precision.activations)
        check_numbers(mfu=self.mfu)
        if self.mfu > 1:
            raise ValueError(mismatch("mfu", "a number above 0, at most 1", self.mfu))
        tp = self.mesh.size("tp")
        for name, size in (("heads", self.model.heads), ("hidden", self.model.hidden)):
            if size % tp:
                raise ValueError(mismatch("tp", f"a divisor of {name} {size}", tp))

    # What a chip holds

    @property
    def tokens(self) -> float:
        """Tokens that a chip computes in a step. All chips along tp and vocab compute the same tokens."""
        return self.batch.tokens / self.mesh.size("dp", "fsdp", "context")

    @property
    def chip_parameters(self) -> float:
        """Parameters that a chip computes with, counting FSDP's weights as gathered."""
        layers = self.model.layers * self.model.layer_parameters
        classes = self.model.parameters - layers
        return layers / self.mesh.size("tp") + classes / self.mesh.size("tp", "vocab")

    @property
    def memory(self) -> Memory:
        model, mesh, precision = self.model, self.mesh, self.precision
        owned, tp = self.chip_parameters / mesh.size("fsdp"), mesh.size("tp")
        largest = max(model.layer_parameters / tp, model.head_parameters / mesh.size("tp", "vocab"))
        # Saved per layer and token: inputs and outputs of two norms; queries, keys, values and their output.
        kept = 4 * model.width + 2 * (model.width + model.kv_width) / tp
        return Memory(
            weights=precision.weights * owned,
            gradients=precision.gradients * owned,
            optimizer=precision.optimizer * owned,
            gathered=precision.weights * largest if mesh.size("fsdp") > 1 else 0,
            activations=precision.activations
            * self.tokens
            * model.layers
            * (model.width if self.remat else kept),
            workspace=max((taken.memory for taken in self._operators.values()), default=0),
        )

    # What a chip does

    @property
    def compute(self) -> tuple[float, float]:
        """FLOPs of a chip, forward and backward."""
        model, tp = self.model, self.mesh.size("tp")
        layers = model.layers * (2 * model.layer_parameters + 2 * self.batch.sequence * model.width) / tp
        forward = self.tokens * (layers + 2 * model.head_parameters / self.mesh.size("tp", "vocab"))
        return forward, (3 if self.remat else 2) * forward

    @property
    def sends(self) -> dict[str, tuple[float, float]]:
        """Bytes that a chip sends for each strategy, forward and backward."""
        return {
            axis.strategy: self._sent_by(axis.strategy) if axis.size > 1 else (0, 0)
            for axis in self.mesh.axes
        }

    def _sent_by(self, strategy: str) -> tuple[float, float]:
        model, precision = self.model, self.precision
        weights, gradients = (
            precision.weights * self.chip_parameters,
            precision.gradients * self.chip_parameters,
        )
        owned_gradients = sent("all-reduce", gradients / self.mesh.size("fsdp"))
        activations = sent("all-reduce", precision.activations * self.tokens * model.width)
        states = sent("all-reduce", STATE_BYTES * self.tokens)
        if strategy == "dp":
            return 0, owned_gradients
        if strategy == "fsdp":
            gathered = sent("all-gather", weights)
            return gathered, gathered + sent("reduce-scatter", gradients)
        if (
            strategy == "vocab"
        ):  # forward: embedded tokens, and states of the loss; backward: the gradient of the head's input
            return activations + states, activations
        if strategy == "tp":
            layers = 2 * model.layers * activations
            return layers + activations + states, (2 if self.remat else 1) * layers + activations
        shards = (
            2 * model.layers * self.tokens * self.mesh.size("context") * model.kv_width / self.mesh.size("tp")
        )
        keys_and_values = sent("all-gather", precision.activations * shards)
        return keys_and_values, 2 * keys_and_values + owned_gradients

    def phases(self, strategy: str) -> Phases:
        """A chip's FLOPs with the bytes of one strategy.

        They give its interconnect intensity (equation 7).
        """
        works = (Work(flops, bytes) for flops, bytes in zip(self.compute, self.sends[strategy], strict=True))
        return Phases(*works)

    # How long it takes

    @property
    def _operators(self) -> dict[str, Taken]:
        """Costs of a layer's operators and of the loss, by name; empty without `cost`."""
        if not self.cost:
            return {}
        length, activations = self.batch.sequence, self.precision.activations
        return operators_of(self.model, self.mesh, self.tokens, length, activations)

    @property
    def operator_seconds(self) -> dict[str, tuple[float, float]]:
        """The parts of `compute_seconds`: each operator, and "products" for the rest.

        Empty without `cost`.
        """
        found = {}
        for name, (forward, backward, _) in self._operators.items():
            of_layers = name != "loss"
            times, again = self.model.layers if of_layers else 1, forward if self.remat and of_layers else 0
            found[name] = times * forward, times * (backward + again)
        if found:
            parameters = self.model.layers * self.model.projection_parameters / self.mesh.size("tp")
            seconds = 2 * self.tokens * parameters / (self.mesh.hardware.peak * self.mfu)
            found["products"] = seconds, (3 if self.remat else 2) * seconds
        return found

    @property
    def compute_seconds(self) -> tuple[float, float]:
        """Seconds of arithmetic alone, forward and backward."""
        if found := self.operator_seconds:
            forward, backward = (sum(times) for times in zip(*found.values(), strict=True))
        else:
            rate = self.mesh.hardware.peak * self.mfu
            forward, backward = (flops / rate for flops in self.compute)
        return forward, backward

    @property
    def send_seconds(self) -> dict[str, tuple[float, float]]:
        """Seconds of communication alone, for each strategy, forward and backward."""
        rates = {axis.strategy: axis.links * self.mesh.hardware.link for axis in self.mesh.axes}
        return {
            name: (forward / rates[name], backward / rates[name])
            for name, (forward, backward) in self.sends.items()
        }

    @property
    def _times(self) -> tuple[dict[str, float], dict[str, float]]:
        times = {"compute": self.compute_seconds, **self.send_seconds}
        forward, backward = ({name: both[phase] for name, both in times.items()} for phase in (0, 1))
        return forward, backward

    @property
    def bound(self) -> tuple[str, str]:
        """What takes longest in forward and in backward: "compute", or a strategy."""
        forward, backward = self._times
        return max(forward, key=forward.__getitem__), max(backward, key=backward.__getitem__)

    @property
    def step_seconds(self) -> float:
        """Seconds of a step: forward, then backward, each as long as its slowest part."""
        return sum(max(times.values()) for times in self._times)

    @property
    def overlapped_seconds(self) -> float:
        """The longer phase alone (equation 6). `Phases.overlapped_seconds` says what that assumes."""
        return max(max(times.values()) for times in self._times)

    @property
    def communication_seconds(self) -> float:
        """Seconds of a step if there were no arithmetic: the slowest strategy of each phase."""
        return sum(max(seconds, default=0) for seconds in zip(*self.send_seconds.values(), strict=True))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all chips together."""
        return self.batch.tokens / self.step_seconds

    @property
    def step_mfu(self) -> float:
        """MFU of the step including communication (equation 3).

        Recomputation does not count as useful FLOPs.
        """
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
        replicas = self.mesh.size("dp", "fsdp")
        if self.batch.tokens < replicas * self.batch.sequence:
            found.append(
                f"{self.batch.tokens / self.batch.sequence:.0f} sequences of {self.batch.sequence:g} tokens "
                f"for {replicas} shards of the batch: shorten them, or shard them too (context)"
            )
        hardware = self.mesh.hardware
        if (pod := PODS.get(hardware.name)) and not is_slice(self.mesh.joined, pod):
            shape, cube = (" x ".join(map(str, sizes)) for sizes in pod)
            found.append(
                f"{self.mesh.joined} chips are no slice of {hardware.name}: cubes of {cube} in a pod of "
                f"{shape}"
            )
        for axis in self.mesh.axes:
            if 1 < axis.size < 2 ** int(axis.links):
                found.append(f"{axis.strategy}: {axis.size} chips do not lie along {axis.links:g} axes")
        if self.memory.total > hardware.memory:
            found.append(
                f"{self.memory.total:.3g} bytes a chip, where {hardware.name} has {hardware.memory:.3g}"
            )
        return tuple(found)

    def __str__(self) -> str:
        """A table like Table 3 with the numbers of this plan."""
        hardware, batch = self.mesh.hardware, self.batch
        lines = [
            f"{self.mesh}",
            f"{batch.tokens:.4g} tokens a step, {self.tokens:.4g} a chip, in sequences of {batch.sequence:g}",
            "",
            f"{'':<10}{'forward':>26}{'backward':>26}{'intensity':>13}{'needed':>9}",
            f"{'compute':<10}{_columns('FLOP', self.compute, self.compute_seconds)}",
        ]
        for name, (forward, backward) in self.operator_seconds.items():
            lines.append(f"  {name:<11}{forward:>21.3g} s{backward:>24.3g} s")
        rate = max(flops / of for flops, of in zip(self.compute, self.compute_seconds, strict=True))
        for axis in self.mesh.axes:
            name = axis.strategy
            intensity = self.phases(name).intensity
            needed = rate / (axis.links * hardware.link)
            sends = _columns("B", self.sends[name], self.send_seconds[name])
            lines.append(f"{name:<10}{sends}{intensity:>13.0f}{needed:>9.0f}")
        memory = ", ".join(f"{name} {size:.3g}" for name, size in vars(self.memory).items() if size)
        lines += [
            f"{'bound':<10}{self.bound[0]:>26}{self.bound[1]:>26}",
            "",
            f"step      {self.step_seconds:.3g} s, {self.tokens_per_second:.3g} tokens/s, "
            f"MFU {self.step_mfu:.1%}",
            f"memory    {self.memory.total:.3g} B a chip: {memory}",
            *(f"note      {note}" for note in self.notes),
        ]
        return "\n".join(lines)


def _columns(unit: str, amounts: tuple[float, float], seconds: tuple[float, float]) -> str:
    both = zip(amounts, seconds, strict=True)
    return "".join(f"{amount:>11.3g} {unit:<4}{second:>8.3g} s" for amount, second in both)


def plans(
    model: Model,
    batch: Batch,
    hardware: Hardware,
    chips: int,
    links: Mapping[str, float],
    *,
    precision: Precision | None = None,
    mfu: float = 1.0,
    remat: bool = False,
    cost: bool = False,
) -> list[Plan]:
    """Plans for all meshes of `chips`, shortest step first; ties by least communication.

    links: the strategies, with the number of physical axes of each. Meshes whose tp size does not divide the
    heads and the hidden width are left out. Other arguments are those of `Plan`.

    Raises TypeError or ValueError for an argument that is not as above, and if no mesh is left.
    """
    tp_divides = (mesh for mesh in meshes(hardware, chips, links) if _divides(mesh.size("tp"), model))
    found = [Plan(model, batch, mesh, precision or Precision(), mfu, remat, cost) for mesh in tp_divides]
    if not found:
        strategies = ",".join(f"{name}:{of:g}" for name, of in links.items())
        expected = (
            f"strategies that share the chips: links of {hardware.name} join at most {hardware.joined}, "
            f"and tp divides {model.heads} heads and a hidden width of {model.hidden}"
        )
        raise ValueError(mismatch("mesh", expected, f"{strategies or 'none'} of {chips} chips"))
    return sorted(found, key=lambda plan: (plan.step_seconds, plan.communication_seconds))


def _divides(tp: int, model: Model) -> bool:
    return model.heads % tp == 0 and model.hidden % tp == 0


def best(candidates: Iterable[Plan], memory: float | None = None) -> Plan:
    """The plan with the shortest step that fits into `memory` bytes per chip (None: the chip's own memory).

    Raises ValueError if none fits, or if there are no candidates.
    """
    found = list(candidates)
    if not found:
        raise ValueError(mismatch("candidates", "at least one plan", "none"))
    fit = [
        plan
        for plan in found
        if plan.memory.total <= (plan.mesh.hardware.memory if memory is None else memory)
    ]
    if not fit:
        least = min(found, key=lambda plan: plan.memory.total)
        room = least.mesh.hardware.memory if memory is None else memory
        expected = f"at least {least.memory.total:.3g} bytes, which {least.mesh} needs"
        raise ValueError(mismatch("memory", expected, f"{room:.3g}"))
    return min(fit, key=lambda plan: (plan.step_seconds, plan.communication_seconds))
