"""How long a training step takes on the slowest chip, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from monoidreduce.theory.plan.layer import ATTENTION_BACKWARD, Layer, Product
from monoidreduce.theory.plan.operators import STATE_BYTES
from monoidreduce.theory.plan.pipeline import bubble

if TYPE_CHECKING:
    from monoidreduce.theory.plan.planner import Plan

__all__ = ["Step", "Times", "step_of"]

BF16 = 2
# Bytes that a loss moves for each logit in a phase: in 16 bits, and with copies in float32.
FUSED_LOGITS, LOGITS = 6, 12
# Bytes of a cast to 8 bits: 16 read, 8 written.
CAST = 3


@dataclass(frozen=True)
class Times:
    """Seconds of forward, of what backward runs again, and of backward."""

    forward: float = 0.0
    again: float = 0.0
    backward: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.again + self.backward

    def __add__(self, other: Times) -> Times:
        return Times(self.forward + other.forward, self.again + other.again, self.backward + other.backward)

    def __rmul__(self, times: float) -> Times:
        return Times(times * self.forward, times * self.again, times * self.backward)


@dataclass(frozen=True)
class Step:
    """A training step of the slowest chip.

    Attributes:
        arithmetic: seconds of a microbatch, by what takes them.
        waits: seconds of a microbatch that arithmetic waits for each strategy's collectives.
        links: seconds of a step that each strategy's collectives take, hidden ones too.
        microbatches: forward and backward passes of a step.
        bubble: seconds that the chip waits for other stages of the pipeline.
        gradients: seconds at the end of a step that gradients and weights of replicas are still sent.
        optimizer: seconds of the update of the parameters that the chip owns.
    """

    arithmetic: dict[str, Times]
    waits: dict[str, Times]
    links: dict[str, float]
    microbatches: int
    bubble: float
    gradients: float
    optimizer: float

    @property
    def microbatch(self) -> Times:
        """Forward and backward of one microbatch."""
        return sum((*self.arithmetic.values(), *self.waits.values()), Times())

    @property
    def seconds(self) -> float:
        return self.microbatches * self.microbatch.total + self.bubble + self.gradients + self.optimizer


def step_of(plan: Plan) -> Step:
    return _Clock(plan).step()


class _Clock:
    """Seconds of the parts of a plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.mesh, self.rates = plan, plan.mesh, plan.reached
        hardware = plan.mesh.hardware
        self.peak = self.rates.matmul * hardware.peak
        self.peak8 = self.rates.float8 * (hardware.float8 or hardware.peak)
        self.attention_peak = hardware.peak * (self.rates.sinks if plan.model.sinks else self.rates.attention)
        self.bandwidth = self.rates.memory * hardware.bandwidth

    def step(self) -> Step:
        """The step of the longest stage, with or without the head."""
        loss, stages = self.loss(), self.plan.stages
        return max(
            (self.of_stage(layers, loss if head else Times()) for layers, head in stages), key=_seconds
        )

    def of_stage(self, layers: tuple[tuple[Layer, float], ...], loss: Times) -> Step:
        plan, mesh = self.plan, self.mesh
        arithmetic: dict[str, Times] = {}
        waits: dict[str, Times] = {}
        links: dict[str, float] = {}
        for layer, count in layers:
            parts = self.layer_parts(layer)
            for name, part in parts.items():
                arithmetic[name] = arithmetic.get(name, Times()) + count * part
            of_links = self.layer_links(layer, parts)
            for name, (busy, wait) in of_links.items():
                waits[name] = waits.get(name, Times()) + count * wait
                links[name] = links.get(name, 0.0) + plan.microbatches * count * busy.total
            if layer.local_experts and not plan.dispatch.grouped:
                exchange = of_links["expert"][1] if "expert" in of_links else Times()
                late = self.launches(layer, parts["experts"] + exchange)
                waits["host"] = waits.get("host", Times()) + count * late
        if loss.total:
            arithmetic["loss"] = loss
        for name, (busy, wait) in self.ends().items():
            waits[name] = waits.get(name, Times()) + wait
            links[name] = links.get(name, 0.0) + plan.microbatches * busy.total
        stages, chunks = mesh.size("pipeline"), plan.chunks
        one = sum((*arithmetic.values(), *waits.values()), Times())
        gradients = self.gradients(one, links)
        return Step(
            arithmetic,
            waits,
            links,
            plan.microbatches,
            bubble(plan.schedule, stages, chunks, one.forward, one.again + one.backward),
            gradients,
            plan.precision.updated * plan.owned_parameters / self.bandwidth,
        )

    # Arithmetic

    def products(self, products: list[Product], eight: bool) -> Times:
        """Seconds of products, and of sums of gradients of weights over microbatches."""
        precision = self.plan.precision
        flops = sum(product.flops for product in products)
        inputs, weights, outputs = (
            sum(getattr(product, name) for product in products) for name in ("inputs", "weights", "outputs")
        )
        if eight:
            moved, cast = inputs + weights + BF16 * outputs, CAST * (inputs + weights)
            moved_back, cast_back = 2 * moved - outputs, CAST * outputs
        else:
            moved, cast, cast_back = BF16 * (inputs + weights + outputs), 0.0, 0.0
            moved_back = 2 * moved
        seconds = flops / (self.peak8 if eight else self.peak)
        sums = (2 if self.plan.microbatches > 1 else 1) * precision.gradients * weights / self.bandwidth
        return Times(
            seconds + (moved + cast) / self.bandwidth,
            0.0,
            2 * seconds + (moved_back + cast_back) / self.bandwidth + sums,
        )

    def layer_parts(self, layer: Layer) -> dict[str, Times]:
        plan = self.plan
        found = {"products": self.products(layer.products, plan.precision.float8)}
        attention = self.attention(layer)
        moved, moved_back = (bytes / self.bandwidth for bytes in layer.traffic(not plan.cost))
        if plan.cost:
            operators = plan.operators
            found["products"] = self.products([*layer.projections()], plan.precision.float8)
            found["feedforward"] = Times(
                operators["feedforward"].forward, 0, operators["feedforward"].backward
            )
            attention = Times(operators["attention"].forward, 0, operators["attention"].backward)
        found["attention"] = attention
        found["memory traffic"] = Times(moved, 0, moved_back)
        if layer.local_experts:
            moved, moved_back = (bytes / self.bandwidth for bytes in layer.routed_traffic)
            products = self.products(layer.routed_products, plan.precision.float8)
            found["experts"] = products + Times(moved, 0, moved_back)
        return {name: self.again(name, part, layer) for name, part in found.items()}

    def again(self, name: str, part: Times, layer: Layer) -> Times:
        """The part with what backward runs again."""
        recompute, again = self.plan.recompute, 0.0
        if recompute == "full":
            again = part.forward
        elif recompute == "alternate" and name != "attention":
            again = part.forward * (1 if name == "memory traffic" else _alternate(layer))
        elif recompute == "attention" and layer.stored_scores and name == "attention":
            again = part.forward
        return Times(part.forward, again, part.backward)

    def launches(self, layer: Layer, work: Times) -> Times:
        """Seconds that a chip waits for the host to launch products of its experts, which take `work`.

        The host starts when the router is done: it has to know each expert's number of tokens. Backward has
        twice the products of forward.
        """
        third = self.rates.launching * layer.local_experts / 3
        late = Times(third, third if work.again else 0, 2 * third) + -1 * work
        return Times(*(max(seconds, 0.0) for seconds in (late.forward, late.again, late.backward)))

    def attention(self, layer: Layer) -> Times:
        forward = layer.attention_flops
        if layer.stored_scores:
            # Two products of many small matrices; scores' traffic is in the memory traffic.
            return Times(forward / self.peak, 0, 2 * forward / self.peak)
        return Times(forward / self.attention_peak, 0, ATTENTION_BACKWARD * forward / self.attention_peak)

    def loss(self) -> Times:
        plan, model = self.plan, self.plan.model
        if plan.cost:
            return Times(plan.operators["loss"].forward, 0, plan.operators["loss"].backward)
        classes = model.vocabulary / self.mesh.size("tp", "vocab")
        head = self.products([Product(plan.microbatch_tokens, model.width, classes)], False)
        moved = (FUSED_LOGITS if plan.fused_loss else LOGITS) * plan.microbatch_tokens * classes
        return head + Times(moved / self.bandwidth, 0, moved / self.bandwidth)

    # Collectives: (busy, waited for)

    def hides(self, strategy: str) -> bool:
        return strategy in self.plan.overlap

    def layer_links(self, layer: Layer, parts: dict[str, Times]) -> dict[str, tuple[Times, Times]]:
        plan, mesh = self.plan, self.mesh
        found = {}
        work = sum(parts.values(), Times())
        again = plan.recompute == "full"
        if (tp := mesh.size("tp")) > 1:
            blocks = 1 if plan.model.parallel else 2
            wire = mesh.wire(self.rates.links, "tp")
            sums = blocks * wire.reduce_seconds(BF16 * layer.tokens * plan.model.width)
            busy = Times(sums, sums if again else 0, sums)
            if self.hides("tp"):
                # In as many pieces as chips, behind products; the first piece is waited for.
                first = (1 / tp) * busy
                wait = first + self.behind((1 - 1 / tp) * busy, work, "tp")
            else:
                # Appendix D: gradients of inputs are sent while those of weights are computed. Gathers block.
                blocking = sums / 2 if plan.sequence_parallel else 0.0
                rest = max(sums - blocking - parts["products"].forward, 0.0)
                wait = Times(sums, busy.again, blocking + rest)
            found["tp"] = busy, wait
        if (context := mesh.size("context")) > 1:
            wire = mesh.wire(self.rates.links, "context")
            keys = 2 * layer.tokens * context * plan.model.kv_width / min(tp, plan.model.kv_heads)
            gather = wire.gather_seconds(BF16 * keys)
            busy = Times(gather, gather if again else 0, 2 * gather)
            found["context"] = busy, self.behind(busy, parts["attention"], "context")
        if mesh.size("expert") > 1 and layer.sparse and plan.model.experts is not None:
            wire = mesh.wire(self.rates.links, "expert")
            tokens, nodes = BF16 * layer.tokens * plan.model.width / tp, wire.nodes
            across = tokens * plan.model.experts.reached(nodes) * (nodes - 1) / nodes
            back = wire.exchange_seconds(
                plan.model.experts.chosen * tokens, across if plan.dispatch.by_node else None
            )
            sent = plan.dispatch.bytes / BF16 * back
            busy = Times(sent + back, sent + back if again else 0, sent + back)
            found["expert"] = busy, self.behind(busy, work, "expert")
        if plan.state_chips > 1 and mesh.size("pipeline") == 1:
            busy = self.sharded(layer.parameters)
            found["fsdp"] = busy, self.behind(busy, work, "fsdp")
        return found

    def sharded(self, parameters: float) -> Times:
        """FSDP: weights are gathered in both phases, gradients reduce-scattered."""
        wire, precision = self.mesh.wire(self.rates.links, *self.plan.state_axes), self.plan.precision
        gather = wire.gather_seconds(precision.weights * parameters)
        return Times(gather, 0, gather + wire.gather_seconds(precision.sent * parameters))

    def behind(self, busy: Times, work: Times, strategy: str) -> Times:
        """What is waited for if collectives run beside this work, which they slow down."""
        back = self.after(busy.again + busy.backward, work.again + work.backward, strategy)
        return Times(self.after(busy.forward, work.forward, strategy), 0, back)

    def ends(self) -> dict[str, tuple[Times, Times]]:
        """Collectives of a microbatch besides those of layers."""
        plan, mesh, model = self.plan, self.mesh, self.plan.model
        found = {}
        activations = BF16 * plan.microbatch_tokens * model.width
        for name in ("tp", "vocab"):
            if mesh.size(name) > 1:
                wire = mesh.wire(self.rates.links, name)
                sums = wire.reduce_seconds(activations)
                states = wire.reduce_seconds(STATE_BYTES * plan.microbatch_tokens)
                found[name] = (Times(sums + states, 0, sums),) * 2
        if mesh.size("pipeline") > 1:
            send = plan.chunks * mesh.wire(self.rates.links, "pipeline").send_seconds(
                activations / mesh.size("tp")
            )
            busy = Times(send, 0, send)
            found["pipeline"] = busy, Times() if self.hides("pipeline") else busy
        if plan.state_chips > 1 and mesh.size("pipeline") == 1:
            busy = self.sharded(plan.model.head_parameters / mesh.size("tp", "vocab"))
            found["fsdp"] = busy, self.behind(busy, self.loss(), "fsdp")
        return found

    def gradients(self, one: Times, links: dict[str, float]) -> float:
        """Gradients of replicas are summed, and with ZeRO weights are gathered."""
        plan, mesh, precision = self.plan, self.mesh, self.plan.precision
        waited = 0.0
        if plan.state_chips > 1 and mesh.size("pipeline") > 1:  # gathered once a step
            wire = mesh.wire(self.rates.links, *plan.state_axes)
            gather = wire.gather_seconds(precision.weights * plan.chip_parameters)
            scatter = wire.gather_seconds(precision.sent * plan.chip_parameters)
            links["fsdp"] = gather + scatter
            waited += self.after(gather, one.forward, "fsdp") + self.after(
                scatter, one.again + one.backward, "fsdp"
            )
        shared = plan.chip_parameters - plan.expert_parameters
        for strategies, parameters in (
            (plan.replica_axes, shared),
            (tuple(name for name in plan.replica_axes if name != "expert"), plan.expert_parameters),
        ):
            if mesh.size(*strategies) == 1 or parameters == 0:
                continue
            wire = mesh.wire(self.rates.links, *strategies)
            sums = wire.gather_seconds(precision.sent * parameters / plan.state_chips)
            # A reduce-scatter; then gradients are gathered, or weights that were updated.
            second = wire.gather_seconds(
                (precision.weights if plan.zero else precision.sent) * parameters / plan.state_chips
            )
            scatters = plan.microbatches if plan.zero == 2 else 1  # ZeRO 2 keeps no whole gradients
            links["dp"] = links.get("dp", 0.0) + scatters * sums + second
            hidden = one.again + one.backward
            waited += scatters * self.after(sums, hidden, "dp")
            waited += self.after(second, one.forward if plan.zero else max(hidden - sums, 0), "dp")
        return waited

    def after(self, busy: float, work: float, strategy: str) -> float:
        """Seconds by which collectives that take `busy` make `work` longer."""
        if not self.hides(strategy):
            return busy
        return self.rates.beside * busy + max((1 - self.rates.beside) * busy - work, 0.0)


def _seconds(step: Step) -> float:
    return step.seconds


def _alternate(layer: Layer) -> float:
    """The share of products that backward runs again: of keys, output and gate."""
    model = layer.model
    keys, output = model.width * model.kv_width, model.width * model.output_width
    gate = model.feedforward_parameters / (2 + model.gated) if model.gated else 0
    return (keys + output + gate) / model.layer_parameters
