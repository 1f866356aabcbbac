"""The worked examples of "Rooflines and Scaling": its value, and ours where its own formula has another."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from monoidreduce import flops, plan
from monoidreduce.plan import HARDWARE, MODELS, Roofline, Work

A100, V5P = HARDWARE["a100"], HARDWARE["v5p"]
FOUR_MILLION = 2**22  # the paper's batch of 4.19m tokens
DAY = 86400


def as_in_the_paper(name: str) -> plan.Model:
    """The model with as many heads of keys as of queries."""
    return replace(MODELS[name], kv_heads=MODELS[name].heads)


# 1.1 and 1.2: rooflines


def test_critical_intensity_of_an_a100() -> None:
    assert plan.on_device(A100) == Roofline(3.12e14, 1.6e12)
    assert plan.on_device(A100).critical_intensity == pytest.approx(195, rel=1e-12)


def test_the_roofline_of_the_figure() -> None:
    roofline = Roofline(1e13, 1e11)
    assert roofline.critical_intensity == 100
    assert roofline.rate(10) == 1e12 and roofline.rate(1000) == 1e13
    assert roofline.mfu(50) == 0.5
    # The paper: 100 % iff the intensity is critical. Its bound min(1, I / I*) is 1 beyond that too.
    assert roofline.mfu(100) == roofline.mfu(200) == 1


def test_a_kernel_takes_at_least_the_longer_and_at_most_the_sum() -> None:
    roofline, work = Roofline(1e13, 1e11), Work(2e13, 3e11)
    assert roofline.seconds(work) == 3 and roofline.seconds_without_overlap(work) == 5
    assert roofline.rate(work.intensity) == work.flops / roofline.seconds(work)


# 1.3 and Appendix A: kernels


def test_gemm() -> None:
    assert plan.gemm(3, 5, 7) == Work(2 * 3 * 5 * 7, 2 * (15 + 35 + 21))
    critical = plan.on_device(A100).critical_intensity
    # A third of the width; so 3 I* = 585 is needed, the paper's ~600.
    assert plan.gemm(600, 600, 600).intensity == pytest.approx(200, rel=1e-12)
    assert plan.gemm(585, 585, 585).intensity == pytest.approx(critical, rel=1e-12)
    assert (100 * plan.gemm(585, 585, 585)).intensity == pytest.approx(critical, rel=1e-12)  # a batch of 100


def test_naive_gemm() -> None:
    assert plan.naive_gemm(64, 1, 64).intensity == pytest.approx(1 / 3, rel=1e-12)
    assert plan.naive_gemm(64, 1e9, 64).intensity == pytest.approx(0.5, rel=1e-8)
    assert plan.naive_gemm(3, 5, 7) == Work(210, 2 * (210 + 21))


def test_launches() -> None:
    assert plan.launch_overhead(100, 1.0) == pytest.approx(1, abs=1e-5)
    assert plan.launch_overhead(100, 1e-12) == pytest.approx(100, rel=1e-4)


def test_linear_layer() -> None:
    tokens, width, factor = 1024, 8192, 3.5
    narrow = factor * width / (factor + 1)
    forward = plan.linear_forward(tokens, width, factor)
    assert forward.flops == 2 * tokens * factor * width**2
    assert forward.intensity == pytest.approx(1 / (1 / tokens + 1 / narrow), rel=1e-12)
    assert forward.intensity == pytest.approx(882.2, abs=0.05)
    assert min(tokens, narrow) / 2 <= forward.intensity <= min(tokens, narrow)
    backward = plan.linear_backward(tokens, width, factor)
    assert backward.flops == 4 * tokens * factor * width**2 and backward.intensity == forward.intensity
    remat = plan.linear_backward(tokens, width, factor, remat=True)
    assert remat.flops == 6 * tokens * factor * width**2 and remat.intensity == forward.intensity


def test_remat_of_a_model() -> None:
    assert plan.training_flops(70e9, 1e6) == 6 * 70e15
    assert plan.training_flops(70e9, 1e6, remat=True) == 8 * 70e15


def test_attention() -> None:
    sequences, length, width = 3, 512, 1024
    unit = sequences * length**2 * width
    assert plan.attention_forward(sequences, length, width).flops == 2 * unit
    assert plan.attention_backward(sequences, length, width).flops == 4 * unit
    assert plan.attention_backward(sequences, length, width, remat=True).flops == 6 * unit
    full = [plan.attention_forward(sequences, length, width, causal=False)]
    full += [plan.attention_backward(sequences, length, width, causal=False, remat=r) for r in (False, True)]
    assert [work.flops for work in full] == [4 * unit, 8 * unit, 12 * unit]
    # The intensity grows with the length alone, and halves under a causal mask (footnote 12).
    assert [work.intensity for work in full] == [length / 2] * 3
    assert plan.attention_forward(7, length, 64).intensity == length / 4


def test_attention_that_stores_scores() -> None:
    for length, head_width in ((4096, 128), (128, 4096)):
        intensity = plan.naive_attention_forward(2, 8, length, head_width).intensity
        assert intensity == pytest.approx(length * head_width / (length + head_width) / 2, rel=1e-12)


# 1.4: training


def test_training_of_70_billion_parameters_on_15_trillion_tokens() -> None:
    flops_70b = plan.training_flops(70e9, 15e12)
    assert flops_70b == pytest.approx(6.3e24, rel=1e-12)
    assert flops_70b == pytest.approx(6.4e24, rel=0.02)  # the paper's
    assert plan.training_seconds(flops_70b, 8960, V5P.peak, 0.4) / DAY == pytest.approx(44.3, abs=0.05)
    assert plan.training_seconds(6.4e24, 8960, V5P.peak, 0.4) / DAY == pytest.approx(
        45.0, abs=0.05
    )  # the paper's


def test_gemm_flops_of_the_paper() -> None:
    model, tokens = as_in_the_paper("llama3-70b"), 1000
    width, factor = model.width, model.hidden / model.width
    layer = 4 * 6 * tokens * width**2 + 3 * 6 * tokens * factor * width**2
    assert model.gemm_flops(tokens) == model.layers * layer + 6 * tokens * width * model.vocabulary
    assert model.attention_flops(tokens, 4096) == 6 * model.layers * tokens * 4096 * width


def test_attention_overhead_of_llama3_70b() -> None:
    model = as_in_the_paper("llama3-70b")
    assert model.balanced_length == pytest.approx(8192 * (4 + 3 * 3.5) + 128256 / 80, rel=1e-12)
    assert model.attention_overhead(4096) == pytest.approx(0.0340, abs=5e-5)  # the paper: 3 to 4 %
    assert MODELS["llama3-70b"].attention_overhead(4096) == pytest.approx(
        0.0386, abs=5e-5
    )  # of its 8 heads of keys


def test_length_at_which_attention_dominates_llama3_405b() -> None:
    model = as_in_the_paper("llama3-405b")
    assert model.balanced_length == pytest.approx(226_298, abs=1)
    assert model.balanced_length == pytest.approx(223_000, rel=0.02)  # the paper's, for about F = 3.2
    assert MODELS["llama3-405b"].balanced_length == pytest.approx(195_578, abs=1)


# 2: interconnect


def test_links_of_a_v5p_pod() -> None:
    assert plan.interconnect(V5P).critical_intensity == pytest.approx(2550, rel=1e-12)
    assert plan.interconnect(V5P, 3).bandwidth == pytest.approx(5.4e11, rel=1e-12)
    assert plan.check_slice((16, 20, 28)) == 8960 and plan.check_slice((4, 4, 4)) == 64
    for shape in ((4, 4), (4, 4, 2), (20, 16, 28)):
        with pytest.raises(ValueError, match=r"shape: expected multiples of \(4, 4, 4\), at most"):
            plan.check_slice(shape)


def test_the_last_logical_axis_lies_together() -> None:
    # The paper: later axes have larger strides under row-major order. It is the earlier ones.
    assert plan.logical_strides((2240, 4)) == (4, 1)
    assert plan.logical_strides((16, 20, 28)) == tuple(torch.empty(16, 20, 28).stride())


@pytest.mark.parametrize("strategy", [plan.data_parallel, plan.fully_sharded])
def test_data_parallel_training_is_bound_by_tokens(strategy: object) -> None:
    pod = plan.interconnect(V5P, 3)
    assert pod.critical_intensity == pytest.approx(850, rel=1e-12)
    assert callable(strategy)
    for tokens_per_chip, is_bound in ((849, False), (851, True)):
        phases = strategy(70e9, 8960 * tokens_per_chip, 8960)
        assert phases.intensity == pytest.approx(tokens_per_chip, rel=1e-12)
        assert phases.is_compute_bound(pod) == is_bound
    # The paper's batch is too small for it, 468 < 850.
    assert round(4.19e6 / 8960) == round(FOUR_MILLION / 8960) == 468
    assert not strategy(70e9, FOUR_MILLION, 8960).is_compute_bound(pod)


def test_what_data_parallel_training_sends() -> None:
    assert plan.data_parallel(1e9, 1e6, 8).forward == Work(2e15 / 8, 0)
    assert plan.data_parallel(1e9, 1e6, 8).backward == Work(4e15 / 8, 4e9)
    assert plan.fully_sharded(1e9, 1e6, 8).forward == Work(2e15 / 8, 2e9)
    assert plan.fully_sharded(1e9, 1e6, 8).backward == Work(4e15 / 8, 4e9)


def test_the_time_of_a_step() -> None:
    parameters, tokens, chips = 70e9, 8960 * 1000, 8960
    step, pod = plan.data_parallel(parameters, tokens, chips), plan.interconnect(V5P, 3)
    # Equation 9, with empirical rates.
    found = Roofline(2e14, 1e11)
    expected = max(4 * parameters * tokens / (found.peak * chips), 4 * parameters / found.bandwidth)
    assert step.overlapped_seconds(found) == expected
    # Equation 6 has two thirds of the time of equations 4 and 5 where arithmetic is the bound.
    flops_a_step = plan.training_flops(parameters, tokens)
    assert step.seconds(pod) == pytest.approx(
        plan.training_seconds(flops_a_step, chips, V5P.peak, 1), rel=1e-12
    )
    assert step.overlapped_seconds(pod) == pytest.approx(step.seconds(pod) / 1.5, rel=1e-12)


def test_tensor_parallel_training_is_bound_by_width() -> None:
    assert plan.least_hidden(64, plan.interconnect(V5P, 3)) == pytest.approx(
        54_400, rel=1e-12
    )  # the paper: 54k
    assert plan.least_hidden(64, plan.interconnect(V5P, 1)) == pytest.approx(
        163_200, rel=1e-12
    )  # its footnote 7
    assert plan.least_hidden(8960, plan.interconnect(V5P, 3)) == pytest.approx(7.616e6, rel=1e-12)  # 7.6m
    assert plan.least_hidden(4, plan.interconnect(V5P, 1)) == pytest.approx(10_200, rel=1e-12)  # 10.2k
    for hidden, is_bound in ((10_199, False), (10_201, True)):
        phases = plan.tensor_parallel(1000, 8192, hidden, 4)
        assert phases.intensity == pytest.approx(hidden / 4, rel=1e-12)
        assert phases.is_compute_bound(plan.interconnect(V5P, 1)) == is_bound


def test_the_best_fsdp_beside_tp() -> None:
    assert plan.optimal_fsdp_chips(FOUR_MILLION, 28672, 8960) == pytest.approx(1619.09, abs=0.005)
    critical = plan.interconnect(V5P).critical_intensity
    needed = plan.least_tokens_per_chip(28672, critical)
    assert needed == pytest.approx(113.39, abs=0.005)
    assert needed < FOUR_MILLION / 8960


def test_times_of_fsdp_and_tp() -> None:
    width, hidden = 8192, 28672
    layer = plan.ShardedLayer.of(FOUR_MILLION, width, hidden, 2240, 4, V5P)
    assert layer.compute_seconds == pytest.approx(0.958e-3, rel=1e-3)
    assert layer.fsdp_seconds == pytest.approx(0.652e-3, rel=1e-3)
    assert layer.tp_seconds == pytest.approx(0.341e-3, rel=1.5e-3)
    assert layer.is_compute_bound and layer.seconds == layer.compute_seconds
    best = plan.optimal_fsdp_chips(FOUR_MILLION, hidden, 8960)
    at_best = plan.ShardedLayer.of(FOUR_MILLION, width, hidden, best, 8960 / best, V5P)
    least = plan.least_communication_seconds(FOUR_MILLION, width, hidden, 8960, V5P.link)
    assert least == pytest.approx(0.4716e-3, rel=1e-3)
    assert at_best.fsdp_seconds == pytest.approx(least, rel=1e-12)
    assert at_best.tp_seconds == pytest.approx(least, rel=1e-12)


def test_equation_15_tells_when_the_best_mesh_is_compute_bound() -> None:
    critical = plan.interconnect(V5P).critical_intensity
    needed = plan.least_tokens_per_chip(28672, critical)
    for tokens_per_chip, expected in ((0.99 * needed, False), (1.01 * needed, True)):
        tokens = 8960 * tokens_per_chip
        best = plan.optimal_fsdp_chips(tokens, 28672, 8960)
        assert plan.ShardedLayer.of(tokens, 8192, 28672, best, 8960 / best, V5P).is_compute_bound == expected


def test_meshes_of_whole_numbers() -> None:
    layers = plan.sharded_layers(FOUR_MILLION, 8192, 28672, 8960, V5P)
    assert all(layer.fsdp_chips * layer.tp_chips == 8960 and 28672 % layer.tp_chips == 0 for layer in layers)
    assert {layer.tp_chips for layer in layers} == {
        1,
        2,
        4,
        7,
        8,
        14,
        16,
        28,
        32,
        56,
        64,
        112,
        128,
        224,
        256,
        448,
        896,
        1792,
    }
    times = [layer.communication_seconds for layer in layers]
    assert times == sorted(times)
    assert times[0] > plan.least_communication_seconds(FOUR_MILLION, 8192, 28672, 8960, V5P.link)
    # Nearest to K_F* are 7 chips, which no model's heads divide by; then the paper's 2240 x 4.
    assert [(layer.fsdp_chips, layer.tp_chips) for layer in layers[:2]] == [(1280, 7), (2240, 4)]


# Table 2 and Appendix C: collectives


def test_collectives() -> None:
    sent = {
        name: plan.sent(name, 1024) for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    }
    assert sent == {"all-gather": 1024, "reduce-scatter": 1024, "all-reduce": 2048, "all-to-all": 256}
    assert sent["all-reduce"] == sent["reduce-scatter"] + sent["all-gather"]
    assert plan.seconds("all-reduce", 1.8e11, V5P.link, 2) == 1
    with pytest.raises(ValueError, match=r"collective: expected one of all-gather, .*, got 'broadcast'"):
        plan.sent("broadcast", 1)


@pytest.mark.parametrize("chips", [2, 4, 6, 8, 16])
def test_rings_send_what_table_2_says(chips: int) -> None:
    for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
        played = plan.ring(name, chips)
        assert played.sent == Fraction(plan.sent(name, 1))
        assert played.steps == (chips if name == "all-reduce" else chips // 2)
    assert plan.ring("all-gather", chips, dummy=False).sent == Fraction(chips - 1, chips)
    assert plan.ring("reduce-scatter", chips, dummy=False).sent == Fraction(chips - 1, chips)
    assert plan.ring("all-to-all", 8).sent == Fraction(16, 64)  # 16 chunks of 1/64


def test_rings_that_are_refused() -> None:
    with pytest.raises(ValueError, match="chips: expected an even number, got 5"):
        plan.ring("all-gather", 5)
    with pytest.raises(TypeError, match=r"chips: expected an int >= 1, got 4\.0"):
        plan.ring("all-gather", 4.0)  # type: ignore[arg-type]


# Appendix D: tensor parallelism line by line


@pytest.mark.parametrize("version", [plan.all_reduce_version, plan.all_gather_version])
def test_lines_of_tensor_parallelism(version: object) -> None:
    assert callable(version)
    tokens, width, hidden, chips = 1000, 8192, 28672, 4
    algorithm = version(tokens, width, hidden, chips)
    product = tokens * width * hidden / chips
    assert algorithm.phases.forward == Work(4 * product, 4 * tokens * width)
    assert algorithm.phases.backward == Work(8 * product, 4 * tokens * width)
    assert algorithm.phases == plan.tensor_parallel(tokens, width, hidden, chips)
    assert not any(line.blocking for line in algorithm.backward if line.operation.startswith("gX"))
    assert all(line.blocking for line in algorithm.forward if line.work.bytes)
    assert all(line.operation in str(algorithm) for line in algorithm.forward + algorithm.backward)


# Appendix E: batch sizes


def test_a_batch_of_the_noise_scale() -> None:
    torch.manual_seed(0)
    gradient, factor, spread = torch.randn(5), torch.randn(5, 5), torch.randn(5, 5)
    hessian, covariance = factor @ factor.T, spread @ spread.T
    model = plan.QuadraticModel.of(gradient, hessian, covariance)
    assert model.noise_scale == pytest.approx(
        (torch.trace(hessian @ covariance) / (gradient @ hessian @ gradient)).item(), rel=1e-5
    )
    assert model.loss_reduction(model.noise_scale) == pytest.approx(model.loss_reduction() / 2)
    assert model.learning_rate(model.noise_scale) == pytest.approx(model.learning_rate() / 2)
    # The rate is the best one of the expected second-order loss (footnote 16, whose sign of g g^T is +).
    batch = 3.0
    second_moment = covariance / batch + torch.outer(gradient, gradient)

    def reduction(rate: float) -> float:
        return (
            rate * gradient.dot(gradient).item() - rate**2 / 2 * torch.trace(hessian @ second_moment).item()
        )

    best = model.learning_rate(batch)
    assert reduction(best) == pytest.approx(model.loss_reduction(batch), rel=1e-4)
    assert max(reduction(0.9 * best), reduction(1.1 * best)) < reduction(best)
    wrong = torch.trace(hessian @ (covariance / batch - torch.outer(gradient, gradient))).item()
    assert best * wrong != pytest.approx(gradient.dot(gradient).item(), rel=0.01)


def test_learning_rates_of_larger_batches() -> None:
    assert plan.covariance_preserving_rate(64, 1e-3, 16) == pytest.approx(2e-3)
    assert plan.linear_rate(64, 1e-3, 16) == pytest.approx(4e-3)


def test_the_knee_of_the_frontier() -> None:
    pareto = plan.Pareto(least_steps=1000, least_samples=2e6)
    assert pareto.critical_batch == 2000
    assert pareto.steps(2000) == 2 * 1000 and pareto.samples(2000) == 2 * 2e6
    for batch in (3.0, 2000.0, 1e6):
        steps, samples = pareto.steps(batch), pareto.samples(batch)
        assert samples == pytest.approx(batch * steps)
        assert (steps / 1000 - 1) * (samples / 2e6 - 1) == pytest.approx(1)


@pytest.mark.parametrize(("big", "small"), [(1024, 16), (64, 8), (3, 2)])
def test_two_batch_sizes_tell_noise_and_gradient(big: int, small: int) -> None:
    trace, squared = 7.0, 3.0
    found = plan.estimate_noise(squared + trace / small, squared + trace / big, small, big)
    assert found == pytest.approx((trace, squared), rel=1e-12)
    with pytest.raises(ValueError, match=f"small: expected less than big {big}, got {big}"):
        plan.estimate_noise(1.0, 1.0, big, big)


@pytest.mark.parametrize("span", [4, 64])
def test_a_frontier_is_found_in_noise(span: float) -> None:
    rng = random.Random(span)
    true = plan.Pareto(1000, 2e6)
    for _ in range(20):
        batches = [true.critical_batch * span ** (k / 4) for k in range(-4, 5)]
        pairs = [
            (
                true.steps(batch) * math.exp(rng.gauss(0, 0.01)),
                true.samples(batch) * math.exp(rng.gauss(0, 0.01)),
            )
            for batch in batches
        ]
        found = plan.fit_pareto(pairs)
        assert found.least_steps == pytest.approx(true.least_steps, rel=0.03)
        assert found.least_samples == pytest.approx(true.least_samples, rel=0.03)


def test_a_frontier_is_found_exactly_and_from_afar() -> None:
    for true in (plan.Pareto(1000, 2e6), plan.Pareto(5e4, 10), plan.Pareto(2, 3e12)):
        pairs = [(true.steps(batch), true.samples(batch)) for batch in (1.0, 100.0, 1e4)]
        found = plan.fit_pareto(pairs)
        assert (found.least_steps, found.least_samples) == pytest.approx(
            (true.least_steps, true.least_samples), rel=1e-5
        )
    with pytest.raises(ValueError, match=r"pairs: expected .* at least two batch sizes"):
        plan.fit_pareto([(10, 100), (20, 200)])
    with pytest.raises(ValueError, match="pairs: expected steps that fall"):
        plan.fit_pareto([(10, 100), (20, 400), (40, 1600)])  # more steps of larger batches


def test_no_schedule_of_as_many_steps_takes_fewer_samples() -> None:
    rng = random.Random(0)
    noise_scales = [10 * 1.5**unit for unit in range(12)]
    best = plan.batch_schedule(noise_scales, 30)
    assert best.steps == pytest.approx(30)
    for _ in range(1000):
        batches = [batch * math.exp(rng.gauss(0, 0.5)) for batch in best.batches]
        # S - S_min is the sum of B_noise / B: one factor for all brings it back to 30 - 12.
        factor = (plan.Schedule.of(batches, noise_scales).steps - 12) / 18
        other = plan.Schedule.of([factor * batch for batch in batches], noise_scales)
        assert other.steps == pytest.approx(30) and other.samples > best.samples
    # Under constant noise, lambda = B_noise is the knee: S = 2 S_min, E = 2 E_min.
    constant = plan.batch_schedule([500.0] * 8, 16)
    assert constant.batches == pytest.approx([500.0] * 8) and constant.samples == pytest.approx(2 * 8 * 500)
    with pytest.raises(ValueError, match="steps: expected more than S_min, 8, got 8"):
        plan.batch_schedule([500.0] * 8, 8)


# The other papers


def test_the_large_cache_of_attention_backward() -> None:
    """The paper on the I/O of attention's backward: d^2 in float32 is 65.5 KB at d = 128.

    An A100's shared memory holds that, and the 48 KB of a GTX 1060 do not.
    """
    square = 4 * 128**2
    assert round(square / 100) == 655
    assert A100.shared is not None and A100.shared >= square > 48 << 10


def test_a_fused_mlp_computes_a_sixth_more_in_a_fiftieth_of_the_memory() -> None:
    """MonoidReduce, section 4: 12 B K D FLOPs become 14, and 2.29 % of the elements are left."""
    tokens = hidden = 16384
    width = 128
    stored, fused = plan.stored_mlp(tokens, width, hidden), plan.fused_mlp(tokens, width, hidden)
    assert fused.flops / stored.flops == pytest.approx(14 / 12, rel=1e-12)
    assert fused.elements / stored.elements == pytest.approx(0.0229, abs=5e-5)
    # As torch counts the operator: three gradients, and no gradient of a bias.
    shapes = (tokens, width), (hidden, width), (width, hidden)
    arguments = (*shapes, None, None, "relu", False, None)
    needed = [True] * 3 + [False] * 2
    counted = flops.forward_flops("mlp", *arguments)
    counted += flops.backward_flops("mlp", (tokens, width), *arguments, needed)
    assert fused.flops == counted


# Our operators


def test_vocabulary_parallel_training_is_bound_by_classes() -> None:
    tokens, width, vocabulary, chips = 4096, 8192, 128256, 8
    phases = plan.vocabulary_parallel(tokens, width, vocabulary, chips, recompute=False)
    product = tokens * width * vocabulary / chips
    assert phases.forward == Work(2 * product, 24 * tokens)
    assert phases.backward == Work(4 * product, 4 * tokens * width)
    assert phases.intensity == pytest.approx(16032, rel=1e-12)
    again = plan.vocabulary_parallel(tokens, width, vocabulary, chips)
    assert again.backward == Work(6 * product, 4 * tokens * width)


def test_context_parallel_training_is_bound_by_tokens_of_a_chip() -> None:
    full = plan.context_parallel(3, 32768, 4096, 4096, 8, causal=False)
    # A step of the ring: 4 n^2 d FLOPs for 4 n d bytes.
    local = 32768 / 8
    assert full.forward == 3 * 8 * Work(4 * local**2 * 4096, 4 * local * 4096)
    assert full.intensity == pytest.approx(local, rel=1e-12)
    assert plan.context_parallel(3, 32768, 4096, 4096, 8).intensity == pytest.approx(local / 2, rel=1e-12)
    assert plan.context_parallel(3, 32768, 4096, 1024, 8).intensity == pytest.approx(2 * local, rel=1e-12)


def test_the_mlp_over_shards_of_its_hidden_width() -> None:
    phases = plan.hidden_parallel(1000, 8192, 28672, 4)
    assert phases.intensity == pytest.approx(28672 / 4, rel=1e-12)
    assert phases.backward == Work(10 * 1000 * 8192 * 28672 / 4, 4 * 1000 * 8192)


# Refusals


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: plan.gemm(0, 1, 1), r"d1: expected a finite number > 0, got 0"),
        (lambda: plan.Roofline(1e12, math.nan), r"bandwidth: expected a finite number > 0, got nan"),
        (lambda: plan.Roofline(1e12, 1e9).rate(-1), r"intensity: expected a number >= 0, got -1"),
        (lambda: plan.Roofline(1e12, 1e9).mfu(math.nan), r"intensity: expected a number >= 0, got nan"),
        (lambda: plan.data_parallel(1e9, 1e6, -1), r"chips: expected a finite number > 0, got -1"),
        (lambda: plan.Model(1, 8, 8, 8, 3, 1), r"heads: expected a divisor of width 8, got 3"),
        (lambda: plan.Model(1, 8, 8, 8, 4, 3), r"kv_heads: expected a divisor of heads 4, got 3"),
        (lambda: plan.Model(0, 8, 8, 8, 4, 4), r"layers: expected an int >= 1, got 0"),
        (lambda: plan.linear_rate(1, 1, 0), r"base_batch: expected a finite number > 0, got 0"),
        (lambda: plan.batch_schedule([1.0, -1.0], 5), r"noise_scales\[1\]: expected a finite number > 0"),
        (lambda: plan.fit_pareto([(1, 2), (0, 3)]), r"pairs\[1\] steps: expected a finite number > 0"),
    ],
)
def test_numbers_that_are_refused(call: object, complaint: str) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=complaint):
        call()
