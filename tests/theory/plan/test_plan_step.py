"""Plans of whole transformers: their steps and memory, put together by hand for small ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from monoidreduce import plan
from monoidreduce.plan import (
    HARDWARE,
    IDEAL,
    MODELS,
    Axis,
    Batch,
    Dispatch,
    Experts,
    Link,
    Mesh,
    Model,
    Plan,
    Precision,
)
from monoidreduce.theory.costs.cost import cost, cost_of_shard
from monoidreduce.theory.costs.sizes import call_of
from monoidreduce.theory.plan.mesh import STRATEGIES

H100, V5P = HARDWARE["h100"], HARDWARE["v5p"]
# Layers of 2 d (d + d_kv) + 3 d D = 3072 + 6144 parameters; 32 * 64 = 2048 of head and embedding each.
TINY = Model(layers=4, width=32, hidden=64, vocabulary=64, heads=4, kv_heads=2)
# No memory traffic to speak of, links of 1e9 bytes/s, and a tenth between nodes.
FAST = replace(
    H100,
    bandwidth=1e30,
    measured=None,
    within=Link(1e9, 0, "round"),
    between=Link(1e8, 0, "round"),
    peak=1e12,
)
PAPER = Precision(weights=2, gradients=2, optimizer=12, sent=2)


def tiny(hardware: Any = FAST, tokens: float = 1024, model: Model = TINY, **options: Any) -> Plan:
    sizes = {name: options.pop(name) for name in plan_strategies(options)}
    axes = tuple(Axis(name, size) for name, size in sizes.items())
    batch = Batch(tokens, 16, options.pop("microbatch", None))
    options = dict(rates=IDEAL, precision=PAPER) | options
    return Plan(model, batch, Mesh(hardware, axes), **options)


def plan_strategies(options: dict[str, Any]) -> list[str]:
    return [name for name in options if name in STRATEGIES]


def flops(model: Model = TINY, tokens: float = 1024) -> float:
    """FLOPs of a step: fused attention's backward has five products where section 1.4 counts four."""
    forward = 2 * tokens * 16 / 2 * 64 * model.layers
    return model.gemm_flops(tokens) + forward + 2.5 * forward


# Arithmetic


def test_one_chip_computes_what_the_formulas_count() -> None:
    assert TINY.layer_parameters == 2 * 32 * (32 + 16) + 3 * 32 * 64 == 9216
    alone = tiny()
    assert alone.step_seconds == pytest.approx(flops() / 1e12, rel=1e-9)
    assert alone.step.links == {} and alone.notes == ()
    useful = TINY.gemm_flops(1024) + TINY.attention_flops(1024, 16)
    assert alone.mfu == pytest.approx(useful / flops(), rel=1e-9)
    assert alone.days(1e9) == pytest.approx(1e9 / 1024 * flops() / 1e12 / 86400)


def test_rates_divide_the_time() -> None:
    slow = tiny(rates=replace(IDEAL, matmul=0.5, attention=0.25))
    forward = 2 * 1024 * 8 * 64 * 4
    assert slow.step_seconds == pytest.approx((2 * TINY.gemm_flops(1024) + 4 * 3.5 * forward) / 1e12)
    with pytest.raises(ValueError, match="matmul: expected a number above 0, at most 1, got 2"):
        replace(IDEAL, matmul=2)


def test_what_runs_again() -> None:
    forward = {name: times.forward for name, times in tiny().step.arithmetic.items()}
    full = tiny(recompute="full").step.arithmetic
    assert full["products"].again == full["products"].forward == forward["products"]
    assert full["attention"].again == forward["attention"] and full["loss"].again == 0
    half = tiny(recompute="alternate").step.arithmetic
    # Keys (of keys and values), the output and the gate: 16 + 32 + 64 of 288 rows of 32.
    assert half["products"].again == pytest.approx(forward["products"] * 112 / 288)
    stored = tiny(recompute="attention", stored_scores=True).step.arithmetic["attention"]
    assert stored.again == stored.forward == 2 * forward["attention"]  # all scores, not half of them
    assert tiny(recompute="attention").step.arithmetic["attention"].again == 0


def test_memory_traffic_is_counted_once_a_byte() -> None:
    """A norm reads and writes, a residual reads two and writes one; of products, operands and results."""
    slow = tiny(replace(FAST, bandwidth=1.0, peak=1e30))
    rows, hidden = 1024 * 32, 1024 * 64
    forward = 2 * 2 * rows + 2 * 3 * rows + 2 * 1024 * (32 + 16) + 3 * hidden
    assert slow.step.arithmetic["memory traffic"].forward == pytest.approx(4 * 2 * forward)
    of_weights = 32 * 64 + 32 * 32 + 32 * 128 + 64 * 32
    moved = of_weights + 1024 * (32 + 64 + 32 + 32 + 32 + 128 + 64 + 32)
    products = slow.step.arithmetic["products"]
    assert products.forward == pytest.approx(4 * 2 * moved)
    assert products.backward == pytest.approx(4 * (4 * moved + 2 * of_weights))  # and gradients are written
    twice = tiny(replace(FAST, bandwidth=1.0, peak=1e30), microbatch=32).step
    assert twice.microbatches == 2
    half = of_weights + (moved - of_weights) / 2
    assert twice.arithmetic["products"].backward == pytest.approx(4 * (4 * half + 4 * of_weights))
    assert slow.step.optimizer == PAPER.updated * TINY.parameters == 28 * TINY.parameters


def test_products_in_8_bits() -> None:
    eight = tiny(replace(FAST, float8=2e12), precision=replace(PAPER, float8=True)).step.arithmetic
    half = tiny().step.arithmetic
    assert eight["products"].total == pytest.approx(half["products"].total / 2)
    assert eight["loss"] == half["loss"]  # the head stays in 16 bits


# Sharing


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp", "context"])
def test_a_step_is_shared_between_the_chips(strategy: str) -> None:
    overlap = ("dp", "fsdp", "tp", "context")
    free = replace(FAST, within=Link(1e30, 0, "free"))
    shared = tiny(free, overlap=overlap, **{strategy: 2})
    assert shared.step_seconds == pytest.approx(flops() / 2e12, rel=1e-9)
    assert shared.tokens == (1024 if strategy == "tp" else 512)


def test_gradients_of_replicas() -> None:
    parameters, half = TINY.parameters, flops() / 2e12
    bytes = 2 * parameters / 2  # of two chips each sends half, for the reduce-scatter and for the all-gather
    exposed = tiny(dp=2, overlap=())
    assert exposed.step.links == {"dp": pytest.approx(2 * bytes / 1e9)}
    assert exposed.step_seconds == pytest.approx(half + 2 * bytes / 1e9)
    # Behind backward, as far as that lasts.
    hidden = tiny(dp=2, overlap=("dp",))
    assert hidden.step_seconds == pytest.approx(
        half + max(2 * bytes / 1e9 - hidden.step.microbatch.backward, 0)
    )
    # ZeRO gathers the updated weights, behind forward.
    zero = tiny(dp=2, overlap=(), zero=1, precision=replace(PAPER, sent=4))
    assert zero.step.gradients == pytest.approx((2 * bytes + bytes) / 1e9)
    assert zero.owned_parameters == parameters / 2
    # ZeRO 2 keeps no whole gradients: they are sent with each of four microbatches.
    two = tiny(dp=2, overlap=(), zero=2, microbatch=8, precision=replace(PAPER, sent=4))
    assert two.step.microbatches == 4
    assert two.step.gradients == pytest.approx((4 * 2 * bytes + bytes) / 1e9)


def test_sharded_state_is_gathered_in_both_phases() -> None:
    waits = tiny(fsdp=2, overlap=()).step.waits["fsdp"]
    sent = 2 * (TINY.parameters - 2048) / 2 / 1e9  # the embedding is a lookup
    assert (waits.forward, waits.backward) == (pytest.approx(sent), pytest.approx(2 * sent))
    again = tiny(fsdp=2, overlap=(), microbatch=8).step
    assert again.microbatches == 4 and again.waits["fsdp"].forward == pytest.approx(sent)
    # In a pipeline once a step.
    staged = tiny(fsdp=2, pipeline=2, overlap=(), microbatch=8)
    assert "fsdp" not in staged.step.waits
    assert staged.step.gradients == pytest.approx(2 * 2 * staged.chip_parameters / 2 / 1e9)
    # Context's chips share state too, beside fsdp.
    assert tiny(fsdp=1, context=2).state_chips == 2 and tiny(context=2).state_chips == 1


def test_collectives_beside_arithmetic_slow_it_down() -> None:
    quick = replace(FAST, within=Link(1e12, 0, "quick"))
    rates = replace(IDEAL, beside=0.25)
    busy = tiny(quick, fsdp=2, overlap=()).step.waits["fsdp"].total
    waited = tiny(quick, fsdp=2, overlap=("fsdp",), rates=rates).step.waits["fsdp"].total
    assert waited == pytest.approx(busy / 4)


def test_tensor_parallelism_blocks_forward() -> None:
    sums = 2 * 2 * 1024 * 32 / 2 / 1e9  # an all-reduce between two chips
    plain = tiny(tp=2, sequence_parallel=False, overlap=()).step
    ends = sums + 2 * 12 * 1024 / 2 / 1e9, sums  # embedded tokens and states of the loss; the head's input
    assert plain.links["tp"] == pytest.approx(4 * 2 * 2 * sums + sum(ends))
    assert plain.waits["tp"].forward == pytest.approx(4 * 2 * sums + ends[0])
    # Appendix D: backward's hide behind the products of weights' gradients, if they are no gathers.
    products = plain.arithmetic["products"].forward
    assert plain.waits["tp"].backward == pytest.approx(4 * 2 * sums - products + ends[1])
    shared = tiny(tp=2, overlap=()).step
    assert shared.waits["tp"].backward == pytest.approx(4 * sums + max(4 * sums - products, 0) + ends[1])
    # In two pieces behind products, the first is waited for.
    free = replace(FAST, within=Link(1e12, 0, "free"))
    pieces = tiny(free, tp=2, overlap=("tp",)).step.waits["tp"].forward
    assert pieces == pytest.approx((4 * 2 * sums / 2 + ends[0]) / 1e3)
    assert tiny(model=replace(TINY, parallel=True), tp=2).step.links["tp"] < plain.links["tp"]


def test_vocabulary_parallelism_shares_the_head_alone() -> None:
    alone, shared = tiny().step, tiny(vocab=4).step
    assert shared.arithmetic["products"] == alone.arithmetic["products"]
    assert shared.arithmetic["loss"].total == pytest.approx(alone.arithmetic["loss"].total / 4)
    sums, states = 2 * 2 * 1024 * 32 * 3 / 4 / 1e9, 2 * 12 * 1024 * 3 / 4 / 1e9
    waits = shared.waits["vocab"]
    assert (waits.forward, waits.backward) == (pytest.approx(sums + states), pytest.approx(sums))


@pytest.mark.parametrize(
    ("schedule", "chunks", "waits"), [("1f1b", 1, 1.0), ("gpipe", 1, 1.0), ("1f1b", 2, 0.5)]
)
def test_a_pipeline_waits_for_its_ends(schedule: str, chunks: int, waits: float) -> None:
    found = tiny(pipeline=2, microbatch=8, schedule=schedule, chunks=chunks)
    step = found.step
    assert step.microbatches == 8
    assert step.bubble == pytest.approx(waits * (2 - 1) * step.microbatch.total)
    assert step.seconds == pytest.approx((8 + waits) * step.microbatch.total)
    # The last stage has the head: it is the slowest.
    assert "loss" in step.arithmetic
    assert found.step.links["pipeline"] == pytest.approx(8 * chunks * 2 * 2 * 128 * 32 / 1e9)


def test_the_head_counts_where_it_makes_a_stage_longer() -> None:
    """Of five layers on two stages, the last one has two and the head."""
    five = replace(TINY, layers=5)
    assert "loss" not in tiny(model=five, pipeline=2, microbatch=8).step.arithmetic
    large = replace(five, vocabulary=4096)
    step = tiny(model=large, pipeline=2, microbatch=8).step
    assert "loss" in step.arithmetic
    assert step.arithmetic["products"].forward == pytest.approx(2 * 2 * 128 * 9216 / 1e12)


def test_dualpipe_waits_less() -> None:
    step = tiny(pipeline=4, microbatch=4, schedule="dualpipe").step
    assert step.bubble < tiny(pipeline=4, microbatch=4).step.bubble / 3


SPARSE = replace(TINY, experts=Experts(count=8, chosen=2, hidden=16, shared=1, dense=1, nodes=None))


def test_experts() -> None:
    one = 3 * 32 * 16
    assert SPARSE.expert_parameters == one
    assert SPARSE.shared_parameters == 3072 + one + 32 * 8
    assert SPARSE.parameters == 9216 + 3 * (SPARSE.shared_parameters + 8 * one) + 2 * 2048
    assert SPARSE.matmul_parameters == 9216 + 3 * (SPARSE.shared_parameters + 2 * one) + 2048
    alone = tiny(model=SPARSE)
    assert alone.step.arithmetic["experts"].forward == pytest.approx(3 * 2 * 1024 * 2 * one / 1e12)
    assert computed(alone) == pytest.approx(2 * 1024 * (SPARSE.matmul_parameters - 2048) / 1e12)
    shared = tiny(model=SPARSE, expert=4, overlap=())
    # A quarter of the tokens, and of the experts; two exchanges a phase of three layers.
    assert shared.tokens == 256 and shared.expert_parameters == 3 * 2 * one
    sent = 2 * 256 * 2 * 32 * 3 / 4 / 1e9
    waits = shared.step.waits["expert"]
    assert (waits.forward, waits.backward) == (pytest.approx(3 * 2 * sent), pytest.approx(3 * 2 * sent))
    assert computed(shared) == pytest.approx(computed(alone) / 4)
    # Tokens in 8 bits, results in 16.
    eight = tiny(model=SPARSE, expert=4, overlap=(), dispatch=Dispatch(bytes=1)).step.waits["expert"]
    assert eight.forward == pytest.approx(3 * 1.5 * sent) and eight.total == pytest.approx(0.75 * waits.total)
    full = tiny(model=SPARSE, expert=4, overlap=(), recompute="full").step
    assert full.waits["expert"].backward == pytest.approx(2 * 3 * 2 * sent)  # forward's again, and its own
    assert full.arithmetic["experts"].again == full.arithmetic["experts"].forward


def computed(found: Plan) -> float:
    """Seconds of products in forward, but the head's."""
    return sum(found.step.arithmetic[name].forward for name in ("products", "experts"))


def test_tokens_cross_the_network_once_a_node() -> None:
    """Of 16 chips in two nodes: 64 tokens of 64 bytes a chip, each for two of 16 experts."""
    wide = replace(SPARSE, experts=replace(SPARSE.experts, count=16))
    each, once = (
        tiny(model=wide, expert=16, overlap=(), dispatch=Dispatch(by_node=by_node)).step.waits["expert"]
        for by_node in (False, True)
    )
    token, nodes = 2 * 32, 2 * (1 - 1 / 2**2)  # a token reaches 1.5 of two nodes
    assert wide.experts.reached(2) == nodes and replace(wide.experts, nodes=1).reached(2) == 1
    assert each.forward == pytest.approx(3 * 2 * 64 * token * 2 / 2 / 1e8)
    assert once.forward == pytest.approx(3 * 2 * 64 * token * nodes / 2 / 1e8)


def test_tokens_are_put_in_order() -> None:
    """A row of an expert is read and written for its chip, for its expert, and on both ways back."""
    slow = replace(FAST, bandwidth=1.0, peak=1e30)
    rows, of_hidden, local = 256 * 2 * 32, 256 * 2 * 16, 2
    products = 2 * rows + 3 * of_hidden + local * 3 * 32 * 16
    for chips, orders in ((4, 2), (8, 1)):
        found = tiny(slow, 256 * chips, SPARSE, expert=chips).step.arithmetic["experts"].forward
        fewer = products - (local - 8 // chips) * 3 * 32 * 16
        assert found == pytest.approx(3 * 2 * (fewer + 4 * orders * rows + 3 * of_hidden))


def test_a_host_launches_experts_one_by_one() -> None:
    """It waits for the router first, and takes 15 us for each of 8 experts; meanwhile these compute."""
    rates = replace(IDEAL, launching=1.5e-5)
    grouped, single = (
        tiny(model=SPARSE, rates=rates, dispatch=Dispatch(grouped=grouped)).step for grouped in (True, False)
    )
    busy, host = grouped.arithmetic["experts"], single.waits["host"]
    assert "host" not in grouped.waits and single.arithmetic == grouped.arithmetic
    assert host.forward == pytest.approx(3 * 8 * 1.5e-5 / 3 - busy.forward)
    assert host.backward == pytest.approx(3 * 8 * 1.5e-5 * 2 / 3 - busy.backward)
    assert single.seconds == pytest.approx(grouped.seconds + host.total)
    # With four chips and a slow exchange it is done before them.
    exchanged = tiny(model=SPARSE, rates=rates, expert=4, overlap=(), dispatch=Dispatch(grouped=False)).step
    assert exchanged.waits["host"].total == 0
    said = tiny(model=SPARSE, dispatch=Dispatch(grouped=False))
    assert "; experts launched one by one" in str(said) and not plan.as_dict(said)["dispatch"]["grouped"]
    with pytest.raises(TypeError, match="grouped: expected "):
        Dispatch(grouped=1)


def test_attention_with_sinks_has_a_fraction_of_its_own() -> None:
    rates = replace(IDEAL, sinks=0.25)
    plain, sinks = (tiny(model=replace(TINY, sinks=sinks), rates=rates) for sinks in (False, True))
    assert sinks.step.arithmetic["attention"].total == pytest.approx(
        4 * plain.step.arithmetic["attention"].total
    )


# Memory


def test_activations_are_those_of_megatron() -> None:
    """Korthikanti and others, equations 1, 2, 4 and 6: s b h (34 + 5 a s / h) on one chip."""
    model = Model(4, 32, 128, 64, 4, 4, gated=False)
    s, b, h, a, t = 16, 64, 32, 4, 2

    def kept(recompute: str, sequence_parallel: bool, **options: Any) -> float:
        found = tiny(
            model=model, dropout=True, stored_scores=True, recompute=recompute,
            sequence_parallel=sequence_parallel, **options,
        )  # fmt: skip
        ((layer, count),) = found.stage_layers
        assert count == 4
        return found.kept(layer)

    assert kept("none", False) == s * b * h * (34 + 5 * a * s / h)
    assert kept("none", False, tp=t) == s * b * h * (10 + 24 / t + 5 * a * s / (h * t))
    assert kept("none", True, tp=t) == s * b * h / t * (34 + 5 * a * s / h)
    assert kept("attention", True, tp=t) == 34 * s * b * h / t
    assert kept("full", False, tp=t) == 2 * s * b * h


def test_memory_of_state() -> None:
    parameters = TINY.parameters
    whole = tiny().memory
    assert (whole.weights, whole.gradients, whole.optimizer) == (
        2 * parameters,
        2 * parameters,
        12 * parameters,
    )
    assert whole.gathered == 0 and whole.workspace == 12 * 1024 * 64
    assert tiny(fused_loss=True).memory.workspace == 4 * 1024 * 64
    sharded = tiny(fsdp=4, tp=2).memory
    assert (sharded.weights, sharded.optimizer) == (0, 12 * parameters / 8)
    assert sharded.gathered == 2 * 2 * 9216 / 2  # two layers
    assert tiny(dp=4, zero=1).memory.optimizer == 3 * parameters
    assert tiny(dp=4, zero=1).memory.gradients == 2 * parameters
    assert tiny(dp=4, zero=2).memory.gradients == parameters / 2
    staged = tiny(fsdp=2, pipeline=2, microbatch=8).memory
    assert (
        staged.gathered == 2 * (2 * 9216 + 2048) == staged.gradients
    )  # all of the stage, for the whole step
    assert whole.total == sum(vars(whole).values())


def test_microbatches_in_flight() -> None:
    few = replace(TINY, vocabulary=4)  # so that the first stage is the fullest
    one = tiny(model=few, pipeline=2, microbatch=8, recompute="full")
    ((layer, count),) = one.stage_layers
    kept = count * one.kept(layer)
    again = layer.working + layer.kept("attention")
    assert one.memory.activations == pytest.approx(2 * kept + again)
    for options, flight in ((dict(schedule="gpipe"), 8), (dict(chunks=2), 2 * (1 + 1 / 4))):
        found = tiny(model=few, pipeline=2, microbatch=8, recompute="full", **options)
        assert found.memory.activations == pytest.approx(flight * kept + again)


def test_notes() -> None:
    (note,) = tiny(dp=128).notes
    assert note.startswith("64 sequences of 16 tokens for 128 shards of the batch")
    batch = Batch(1e6, 1000)
    (note,) = Plan(MODELS["llama3-70b"], batch, Mesh(H100, (Axis("tp", 8),))).notes
    assert note.endswith("where h100 has 8e+10")

    def torus(*axes: Axis) -> tuple[str, ...]:
        found = Plan(MODELS["llama3-8b"], Batch(1e9, 4096), Mesh(V5P, axes)).notes
        return tuple(note for note in found if "bytes" not in note)

    assert torus(Axis("fsdp", 8959, 3)) == (
        "8959 chips are no slice of v5p: cubes of 4 x 4 x 4 in a pod of 16 x 20 x 28",
    )
    assert torus(Axis("tp", 4, 3)) == ("tp: 4 chips do not lie along 3 axes",)
    assert torus(Axis("tp", 8, 3)) == torus(Axis("fsdp", 2240, 2), Axis("tp", 4)) == ()


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: tiny(tp=3), "tp: expected a divisor of heads 4, got 3"),
        (lambda: tiny(pipeline=8), "pipeline: expected at most the 4 layers in stages and chunks, got 8 x 1"),
        (lambda: tiny(pipeline=2, chunks=3), "pipeline: expected at most the 4 layers"),
        (lambda: tiny(expert=2), "expert: expected a divisor of the experts, 0, got 2"),
        (lambda: tiny(model=SPARSE, expert=3), "expert: expected a divisor of the experts, 8, got 3"),
        (lambda: tiny(recompute="some"), "recompute: expected one of none, attention, alternate, full"),
        (lambda: tiny(schedule="zero"), "schedule: expected one of 1f1b, gpipe, dualpipe, got 'zero'"),
        (lambda: tiny(zero=3), "zero: expected 0, 1 or 2, got 3"),
        (lambda: tiny(overlap=("ep",)), "overlap: expected one of dp"),
        (lambda: Batch(0, 1), "tokens: expected a finite number > 0, got 0"),
        (lambda: Precision(weights=-1), "weights: expected a finite number > 0, got -1"),
        (lambda: tiny().days(0), "tokens: expected a finite number > 0, got 0"),
        (lambda: tiny(V5P, cost=True), "hardware: expected a GPU of NVIDIA's, got v5p"),
        (lambda: tiny(H100, model=SPARSE, cost=True), "cost: expected a dense model without a pipeline"),
    ],
)
def test_plans_that_are_refused(call: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()


# Beside the operators' own model

LLAMA = MODELS["llama3-8b"]


def seconds(operator: str, of: Any = cost, **sizes: int) -> tuple[float, float, int]:
    """Forward, backward and peak memory of a call on an H100."""
    tensors, options = call_of(operator, sizes, torch.bfloat16)
    found = of(operator, *tensors, hardware=H100, **options)
    backward = sum(each.seconds for each in found.passes if each.backward)
    return found.seconds - backward, backward, found.peak_memory


def on_h100(*axes: Axis, model: Model = LLAMA, tokens: float = 8 * 4096, **options: Any) -> Plan:
    return Plan(model, Batch(tokens, 4096), Mesh(H100, axes), cost=True, **options)


def test_operators_take_what_cost_says() -> None:
    found = on_h100(Axis("fsdp", 4), Axis("tp", 2))
    attention = seconds("attention", B=2, H=16, Hkv=4, L=4096, N=4096, d=128, causal=True)
    feedforward = seconds("mlp", cost_of_shard, B=8192, K=7168, d=4096, gated=True)
    loss = seconds("linear_cross_entropy", cost_of_shard, N=8192, V=64128, D=4096)
    parts = found.step.arithmetic
    for name, (forward, backward, _), count in (
        ("attention", attention, 32),
        ("feedforward", feedforward, 32),
        ("loss", loss, 1),
    ):
        assert (parts[name].forward, parts[name].backward) == pytest.approx(
            (count * forward, count * backward)
        )
    assert found.memory.workspace == max(attention[2], feedforward[2], loss[2]) > 0
    without = Plan(LLAMA, found.batch, found.mesh)
    # Neither hidden values nor logits are stored.
    assert found.memory.activations < 0.6 * without.memory.activations
    assert "\nfeedforward " in str(found) and ", workspace " in str(found)


def test_chips_share_a_sequence_and_a_head_of_keys() -> None:
    """A zigzag of 4096 positions over 2 chips: the last chunk of 1024 sees all, the first itself."""
    found = on_h100(Axis("context", 2), Axis("tp", 8)).step.arithmetic["attention"]
    parts = [
        seconds("attention", B=8, H=4, Hkv=1, L=1024, N=keys, d=128, causal=True) for keys in (1024, 4096)
    ]
    assert found.forward == pytest.approx(32 * sum(part[0] for part in parts))
    shared = on_h100(Axis("tp", 8), model=replace(LLAMA, kv_heads=4), tokens=4096).step.arithmetic[
        "attention"
    ]
    one = seconds("attention", B=1, H=4, Hkv=1, L=4096, N=4096, d=128, causal=True)
    assert (shared.forward, shared.backward) == pytest.approx((32 * one[0], 32 * one[1]))


# Printed


def test_str_has_the_numbers() -> None:
    found = tiny(pipeline=2, tp=2, microbatch=8, recompute="full", zero=1, chunks=2)
    text = str(found)
    assert "4 x h100: pipeline 2, tp 2\n" in text
    assert "1024 tokens a step in sequences of 16; a chip computes 8 microbatches of 128\n" in text
    assert "recompute full; ZeRO 1; 1f1b of 2 chunks\n" in text
    for name in ("products", "attention", "waits for tp", "bubble", "links", "step", "memory"):
        assert f"\n{name} " in text
    assert "\nnote " in str(tiny(dp=128))


def test_a_dict_for_json() -> None:
    found = tiny(fsdp=2, tp=2)
    entries = plan.as_dict(found)
    assert entries["mesh"] == {"fsdp": 2, "tp": 2} and entries["seconds"]["step"] == found.step_seconds
    parts = entries["seconds"]
    total = sum(parts["arithmetic"].values()) + sum(parts["waits"].values())
    assert total + parts["bubble"] + parts["gradients"] + parts["optimizer"] == pytest.approx(parts["step"])
    assert entries["memory"]["total"] == found.memory.total
