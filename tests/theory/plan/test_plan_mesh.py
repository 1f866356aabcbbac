"""Plans of whole transformers, put together by hand for small ones and with the paper's numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from monoidreduce import plan
from monoidreduce.plan import HARDWARE, MODELS, Axis, Batch, Mesh, Model, Plan
from monoidreduce.theory.costs.cost import cost, cost_of_shard
from monoidreduce.theory.costs.sizes import call_of

V5P, H100 = HARDWARE["v5p"], HARDWARE["h100"]
# Layers of 2 d (d + d_kv) + 3 d D = 3072 + 6144 parameters; 32 * 64 = 2048 of head and embedding each.
TINY = Model(layers=2, width=32, hidden=64, vocabulary=64, heads=4, kv_heads=2)


def axis(strategy: str, size: int, links: float = 1) -> Axis:
    return Axis(strategy, size, links)


def tiny_plan(*axes: Axis, **options: Any) -> Plan:
    return Plan(TINY, Batch(1024, 16), Mesh(V5P, axes), **options)


def test_one_chip_computes_what_the_formulas_count() -> None:
    alone = tiny_plan()
    forward, backward = alone.compute
    assert TINY.layer_parameters == 2 * 32 * (32 + 16) + 3 * 32 * 64 == 9216
    assert forward + backward == TINY.gemm_flops(1024) + TINY.attention_flops(1024, 16)
    assert backward == 2 * forward and alone.sends == {}
    assert alone.step_seconds == pytest.approx((forward + backward) / V5P.peak, rel=1e-12)
    assert alone.communication_seconds == 0 and alone.bound == ("compute", "compute")
    assert alone.step_mfu == pytest.approx(1, rel=1e-12)
    remat = tiny_plan(remat=True)
    assert remat.compute == (forward, 3 * forward)
    # The gained MFU counts what the model needs, not what runs again.
    assert remat.step_mfu == pytest.approx(3 / 4, rel=1e-12)


@pytest.mark.parametrize("strategy", ["dp", "fsdp", "tp", "context"])
def test_a_step_is_shared_between_the_chips(strategy: str) -> None:
    whole, shared = tiny_plan(), tiny_plan(axis(strategy, 4))
    assert shared.compute == pytest.approx([flops / 4 for flops in whole.compute], rel=1e-12)
    assert shared.tokens == (1024 if strategy == "tp" else 256)


def test_what_data_parallel_chips_send_is_the_papers() -> None:
    parameters = TINY.parameters
    for strategy, formula in (("dp", plan.data_parallel), ("fsdp", plan.fully_sharded)):
        expected = formula(parameters, 1024, 4)
        assert tiny_plan(axis(strategy, 4)).sends == {
            strategy: (expected.forward.bytes, expected.backward.bytes)
        }
    # FSDP within replicas: each chip all-reduces the gradients that it owns.
    both = tiny_plan(axis("dp", 2), axis("fsdp", 4)).sends
    assert both == {"dp": (0, 4 * parameters / 4), "fsdp": (2 * parameters, 4 * parameters)}


def test_what_chips_of_tensor_and_vocabulary_parallelism_send() -> None:
    activations = 4 * 1024 * 32  # all-reduced, of two bytes
    states = 24 * 1024
    vocab = (activations + states, activations)
    assert tiny_plan(axis("vocab", 2)).sends == {"vocab": vocab}
    layers = 2 * TINY.layers * activations
    assert tiny_plan(axis("tp", 2)).sends == {"tp": (layers + vocab[0], layers + vocab[1])}
    remat = tiny_plan(axis("tp", 2), remat=True).sends
    assert remat == {"tp": (layers + vocab[0], 2 * layers + vocab[1])}
    # The bytes of a feedforward layer are the lines of Appendix D.
    lines = plan.all_reduce_version(1024, 32, 64, 2).phases
    assert lines.forward.bytes == lines.backward.bytes == activations


def test_what_chips_of_context_parallelism_send() -> None:
    forward, backward = tiny_plan(axis("context", 4)).sends["context"]
    attention = plan.context_parallel(1024 / 16, 16, 32, TINY.kv_width, 4)
    assert forward == TINY.layers * attention.forward.bytes
    assert backward == TINY.layers * attention.backward.bytes + 4 * TINY.parameters


def test_vocabulary_parallelism_shares_the_head_alone() -> None:
    layers = TINY.layers * (2 * TINY.layer_parameters + 2 * 16 * 32)
    assert tiny_plan(axis("vocab", 4)).compute[0] == 1024 * (layers + 2 * 64 * 32 / 4)
    assert tiny_plan(axis("vocab", 4)).tokens == 1024


def test_memory() -> None:
    parameters = TINY.parameters
    whole = tiny_plan().memory
    assert (whole.weights, whole.gradients, whole.optimizer, whole.gathered) == (
        2 * parameters,
        2 * parameters,
        12 * parameters,
        0,
    )
    # Four of width 32 a layer and token, and queries, output (32) and keys, values (16).
    assert whole.activations == 2 * 1024 * 2 * (4 * 32 + 2 * 32 + 2 * 16)
    assert tiny_plan(remat=True).memory.activations == 2 * 1024 * 2 * 32
    sharded = tiny_plan(axis("fsdp", 4), axis("tp", 2)).memory
    assert (sharded.weights, sharded.optimizer) == (2 * parameters / 8, 12 * parameters / 8)
    assert sharded.gathered == 2 * 9216 / 2
    assert sharded.activations == 2 * 256 * 2 * (4 * 32 + (2 * 32 + 2 * 16) / 2)
    assert sharded.total == sum(vars(sharded).values())
    tied = replace(TINY, tied=True)
    assert tied.parameters == tied.matmul_parameters == parameters - 64 * 32


def test_a_step_is_as_long_as_the_slowest_axis() -> None:
    # So few tokens that the links are the bound.
    slow = Plan(TINY, Batch(64, 16), Mesh(V5P, (axis("fsdp", 4, 2), axis("tp", 2))))
    fsdp, tp = slow.send_seconds["fsdp"], slow.send_seconds["tp"]
    assert fsdp[0] == slow.sends["fsdp"][0] / (2 * V5P.link) and tp[0] == slow.sends["tp"][0] / V5P.link
    assert slow.step_seconds == max(fsdp[0], tp[0]) + max(fsdp[1], tp[1]) == slow.communication_seconds
    assert slow.overlapped_seconds == max(*fsdp, *tp)
    assert "compute" not in slow.bound and slow.step_mfu < 0.1
    assert slow.phases("fsdp").intensity < plan.interconnect(V5P, 2).critical_intensity


def test_the_papers_mesh_for_llama3_70b() -> None:
    mesh = Mesh(V5P, (axis("fsdp", 2240, 2), axis("tp", 4)))
    found = Plan(MODELS["llama3-70b"], Batch(4.19e6, 1024), mesh, mfu=0.4)
    assert found.bound == ("compute", "compute") and found.notes == ()
    assert found.step_mfu == pytest.approx(0.4, rel=1e-12)
    # Equations 4 and 5, with attention and without the embedding's parameters.
    model = MODELS["llama3-70b"]
    flops = model.gemm_flops(15e12) + model.attention_flops(15e12, 1024)
    assert found.days(15e12) * 86400 == pytest.approx(
        plan.training_seconds(flops, 8960, V5P.peak, 0.4), rel=1e-12
    )
    assert found.days(15e12) == pytest.approx(44.3, rel=0.02)
    # Pure FSDP is bound by its links at full MFU, as 468 < 850.
    pod = Plan(model, Batch(4.19e6, 400), Mesh(V5P, (axis("fsdp", 8960, 3),)))
    assert pod.bound == ("fsdp", "fsdp")
    # A batch of 1023 sequences has no 2240 shards.
    (note,) = Plan(model, Batch(4.19e6, 4096), mesh).notes
    assert note.startswith("1023 sequences of 4096 tokens for 2240 shards of the batch")


def test_the_best_mesh() -> None:
    model, batch = MODELS["llama3-70b"], Batch(4.19e6, 1024)
    found = plan.plans(model, batch, V5P, 8960, {"fsdp": 2, "tp": 1})
    sizes = [(p.mesh.size("fsdp"), p.mesh.size("tp")) for p in found]
    assert sorted(tp for _, tp in sizes) == [1, 2, 4, 8, 16, 32, 64]  # divisors of 64 heads, 28672 and 8960
    assert all(fsdp * tp == 8960 for fsdp, tp in sizes)
    times = [(p.step_seconds, p.communication_seconds) for p in found]
    assert times == sorted(times)
    assert plan.best(found) == next(p for p in found if p.memory.total <= V5P.memory)
    small = plan.best(found, memory=6.5e9)
    assert small.memory.total <= 6.5e9 and small.mesh.size("tp") == 1
    with pytest.raises(
        ValueError, match=r"memory: expected at least \S+ bytes, which 8960 x v5p: fsdp 8960 .* needs, got 1$"
    ):
        plan.best(found, memory=1)
    with pytest.raises(ValueError, match="candidates: expected at least one plan, got none"):
        plan.best([])


def test_meshes_of_which_none_can_be() -> None:
    model, batch = MODELS["llama3-8b"], Batch(1e6, 4096)
    shares = "mesh: expected strategies that share the chips: links of h100 join at most 8, and tp divides 32"
    for chips, links, got in ((7, {"tp": 1}, "tp:1 of 7"), (16, {"vocab": 1}, "vocab:1 of 16")):
        with pytest.raises(ValueError, match=f"{shares} heads .* got {got} chips$"):
            plan.plans(model, batch, H100, chips, links)
    with pytest.raises(ValueError, match="links: expected at most the 1 of h100 in all, got 2"):
        plan.plans(model, batch, H100, 64, {"fsdp": 1, "tp": 1})


def test_notes_of_meshes_that_no_torus_has() -> None:
    model, batch = MODELS["llama3-8b"], Batch(1e9, 4096)

    def notes(*axes: Axis) -> tuple[str, ...]:
        return tuple(note for note in Plan(model, batch, Mesh(V5P, axes)).notes if "bytes" not in note)

    assert notes(axis("fsdp", 8959, 3)) == (
        "8959 chips are no slice of v5p: cubes of 4 x 4 x 4 in a pod of 16 x 20 x 28",
    )
    assert notes(axis("tp", 4, 3)) == ("tp: 4 chips do not lie along 3 axes",)
    assert notes(axis("tp", 8, 3)) == notes(axis("fsdp", 2240, 2), axis("tp", 4)) == ()


def test_meshes_have_every_factorisation_once() -> None:
    found = [
        tuple(a.size for a in mesh.axes) for mesh in plan.meshes(H100, 12, {"dp": 0.1, "fsdp": 0.2, "tp": 1})
    ]
    # 12 = 2^2 * 3 into three: 6 * 3; but NVLink joins no 12 chips.
    assert len(found) == len(set(found)) == 18 - 1
    assert all(a * b * c == 12 for a, b, c in found)


def test_str_has_the_numbers() -> None:
    text = str(tiny_plan(axis("fsdp", 4, 2), axis("tp", 2)))
    assert "8 x v5p: fsdp 4 over 2 axes, tp 2 over 1 axis" in text
    assert "1024 tokens a step, 256 a chip, in sequences of 16" in text
    for name in ("compute", "fsdp", "tp", "bound", "step", "memory"):
        assert f"\n{name} " in text
    assert "note" not in text
    assert "sequences of 16 tokens for 128 shards" in str(tiny_plan(axis("dp", 128)))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: axis("ep", 2), "strategy: expected one of dp, fsdp, tp, vocab, context, got 'ep'"),
        (lambda: axis("tp", 0), "size: expected an int >= 1, got 0"),
        (lambda: axis("tp", 2, 0), "links: expected a finite number > 0, got 0"),
        (lambda: Mesh(V5P, (axis("tp", 2), axis("tp", 2))), "axes: expected each strategy once"),
        (
            lambda: Mesh(V5P, (axis("tp", 2, 2), axis("dp", 2, 2))),
            "links: expected at most the 3 of v5p in all, got 4",
        ),
        (lambda: Mesh(H100, (axis("tp", 8), axis("dp", 8, 0.1), axis("vocab", 2))), "at most the 1 of h100"),
        (
            lambda: Mesh(H100, (axis("tp", 16),)),
            "size: expected at most the 8 chips that the links of h100 join, got 16",
        ),
        (lambda: tiny_plan(axis("tp", 3)), "tp: expected a divisor of heads 4, got 3"),
        (lambda: tiny_plan(axis("tp", 128)), "tp: expected a divisor of heads 4, got 128"),
        (lambda: tiny_plan(mfu=1.5), r"mfu: expected a number above 0, at most 1, got 1\.5"),
        (lambda: plan.sent("all-gather", -2), "bytes: expected a finite number >= 0, got -2"),
        (lambda: plan.Work(-1, 0), "flops: expected a finite number >= 0, got -1"),
        (lambda: plan.interconnect(V5P, 4), "axes: expected at most the 3 of v5p, got 4"),
        (
            lambda: plan.sharded_layers(2**22, 8192, 28672, 8, V5P, 3, 1),
            "links: expected at most the 3 of v5p in all, got 4",
        ),
        (lambda: Batch(0, 1), "tokens: expected a finite number > 0, got 0"),
        (lambda: plan.Precision(weights=-1), "weights: expected a finite number > 0, got -1"),
        (lambda: tiny_plan().days(0), "tokens: expected a finite number > 0, got 0"),
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


def on_h100(*axes: Axis, **options: Any) -> Plan:
    return Plan(LLAMA, Batch(8 * 4096, 4096), Mesh(H100, axes), mfu=0.5, cost=True, **options)


def test_operators_take_what_cost_says() -> None:
    found = on_h100(axis("fsdp", 4, 0.11), axis("tp", 2))
    attention = seconds("attention", B=2, H=16, Hkv=4, L=4096, N=4096, d=128, causal=True)
    feedforward = seconds("mlp", cost_of_shard, B=8192, K=7168, d=4096, gated=True)
    loss = seconds("linear_cross_entropy", cost_of_shard, N=8192, V=64128, D=4096)
    products = 2 * 8192 * 32 * LLAMA.projection_parameters / 2 / (0.5 * H100.peak)
    assert found.operator_seconds == {
        "attention": pytest.approx([32 * each for each in attention[:2]], rel=1e-12),
        "feedforward": pytest.approx([32 * each for each in feedforward[:2]], rel=1e-12),
        "loss": pytest.approx(loss[:2], rel=1e-12),
        "products": pytest.approx((products, 2 * products), rel=1e-12),
    }
    for phase in (0, 1):
        in_all = 32 * (attention[phase] + feedforward[phase]) + loss[phase] + (1 + phase) * products
        assert found.compute_seconds[phase] == pytest.approx(in_all, rel=1e-12)
    without = Plan(LLAMA, found.batch, found.mesh, mfu=0.5).memory
    assert without.workspace == 0
    assert found.memory.workspace == max(attention[2], feedforward[2], loss[2]) > 0
    assert found.memory.total == without.total + found.memory.workspace
    assert "\n  feedforward " in str(found) and ", workspace " in str(found)


def test_remat_runs_the_operators_of_layers_again() -> None:
    plain, remat = (on_h100(axis("tp", 8), remat=again).operator_seconds for again in (False, True))
    for name, (forward, backward) in plain.items():
        again = 0 if name == "loss" else forward
        assert remat[name] == pytest.approx((forward, backward + again), rel=1e-12)


def test_chips_share_a_sequence_and_a_head_of_keys() -> None:
    """A zigzag of 4096 positions over 2 chips: the last chunk of 1024 sees all, the first itself."""
    found = on_h100(axis("context", 2, 0.11), axis("tp", 8)).operator_seconds["attention"]
    parts = [
        seconds("attention", B=8, H=4, Hkv=1, L=1024, N=keys, d=128, causal=True) for keys in (1024, 4096)
    ]
    assert found == pytest.approx([32 * sum(part[phase] for part in parts) for phase in (0, 1)], rel=1e-12)
    shared = Plan(replace(LLAMA, kv_heads=4), Batch(4096, 4096), Mesh(H100, (axis("tp", 8),)), cost=True)
    one = seconds("attention", B=1, H=4, Hkv=1, L=4096, N=4096, d=128, causal=True)
    assert shared.operator_seconds["attention"] == pytest.approx([32 * each for each in one[:2]], rel=1e-12)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: tiny_plan(cost=True), "hardware: expected a GPU of NVIDIA's, got v5p"),
        (
            lambda: on_h100(precision=plan.Precision(activations=1)),
            "precision: expected activations of 2 or 4 bytes beside cost, got 1",
        ),
    ],
)
def test_plans_that_cost_does_not_know(call: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        call()
    with pytest.raises(TypeError, match="cost: expected True or False, got 1"):
        tiny_plan(cost=1)


def test_a_network_beside_the_links_takes_no_axis_of_theirs() -> None:
    mesh = Mesh(H100, (axis("tp", 8), axis("fsdp", 64, 0.11)))
    assert mesh.chips == 512 and mesh.size("tp", "fsdp") == 512 and mesh.size("vocab") == 1
