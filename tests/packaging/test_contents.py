"""The wheel and the source distribution hold exactly these files."""

import re
import sysconfig
import tarfile
import zipfile

import monoidreduce as mr

PYTHON = """
    _C.pyi __init__.py __main__.py _command_line.py _dynamo.py _interrupt.py _keywords.py _paths.py
    _requirements.py _results.py _torch_private.py _unbuilt.py _validate.py _version.py _yards.py
    explanation.py flops.py functional.py hardware.py inspection.py io.py laws.py map_reduce.py
    monoids.py nn.py plan.py py.typed reference.py stat.py varlen.py workspace.py
    _ops/__init__.py _ops/active_rows.py _ops/attention.py _ops/attention_varlen.py _ops/attention_wide.py
    _ops/cross_entropy.py _ops/distillation.py _ops/dlogits.py _ops/engine.py _ops/gated_mlp.py
    _ops/linear_loss.py _ops/log_probs.py _ops/logsumexp.py _ops/memory.py _ops/mlp.py _ops/mlp_parts.py
    _ops/products.py _ops/registry.py _ops/sinks.py _ops/slices.py _ops/stored_scores.py
    demo/__init__.py demo/data.py demo/fold.py demo/layers.py demo/memory.py demo/model.py demo/policy.py
    demo/report.py demo/scale.py demo/sweep.py demo/train.py demo/transformers.py
    distributed/__init__.py distributed/attention.py distributed/attention_folds.py
    distributed/attention_varlen.py distributed/collectives.py distributed/dtensor.py distributed/fold.py
    distributed/for_operators.py distributed/group.py distributed/messages.py distributed/once.py
    distributed/operators.py distributed/split.py distributed/states.py distributed/user_folds.py
    folds/__init__.py folds/attend.py folds/block_mask.py
    folds/cpp/__init__.py folds/cpp/cpp_kernels.py folds/cpp/cpp_laws.py folds/cpp/cpp_source.py
    folds/cpp_monoid.py folds/cpp_monoid_op.py
    folds/cpu/__init__.py folds/cpu/bytecode.py
    folds/cuda/__init__.py folds/cuda/attention_cuda.py folds/cuda/cache.py folds/cuda/compiler.py
    folds/cuda/cuda_passes.py folds/cuda/cuda_rows.py folds/cuda/cuda_source.py folds/cuda/kernels.py
    folds/distillation.py folds/explain.py folds/for_operators.py folds/modified_attention_op.py
    folds/operands.py folds/ops.py
    folds/program/__init__.py folds/program/arguments.py folds/program/chance.py
    folds/program/derivative.py folds/program/errors.py folds/program/graph.py folds/program/integers.py
    folds/program/mods.py folds/program/operations.py folds/program/program.py folds/program/sequences.py
    folds/program/tracing.py folds/program/vocabulary.py
    folds/stat.py folds/statistics.py folds/statistics_op.py
    folds/torch/__init__.py folds/torch/chunked.py folds/torch/monoid.py folds/torch/reader.py
    folds/wide_attention.py
    integrations/__init__.py integrations/_attention.py integrations/_divergence.py
    integrations/_layers.py integrations/_loss.py integrations/_mlp.py integrations/_sources.py
    integrations/_transformers_version.py integrations/gkd.py integrations/megatron.py
    integrations/torchtitan.py integrations/transformers.py integrations/trl.py integrations/verl.py
    theory/__init__.py
    theory/commands/__init__.py theory/commands/calibrate.py theory/commands/cost.py
    theory/commands/io.py theory/commands/plan.py theory/commands/roofline.py
    theory/costs/__init__.py theory/costs/constants.json theory/costs/cost.py theory/costs/cpu.py
    theory/costs/dry_run.py theory/costs/model.py theory/costs/sizes.py theory/costs/steps.py
    theory/costs/work.py
    theory/hardware.py
    theory/io/__init__.py theory/io/algorithms.py theory/io/bounds.py theory/io/comparison.py
    theory/io/counts.py theory/io/figure.py theory/io/flash.py theory/io/graph.py
    theory/io/large_cache.py theory/io/masks.py theory/io/no_cache.py theory/io/ours.py
    theory/io/partition.py theory/io/pebbles.py theory/io/problem.py theory/io/products.py
    theory/io/small_cache.py theory/io/tiles.py theory/io/trace.py theory/io/two_level.py
    theory/our_tiles.py
    theory/plan/__init__.py theory/plan/_positive.py theory/plan/collectives.py
    theory/plan/critical_batch.py theory/plan/figure.py theory/plan/fsdp_tp.py theory/plan/links.py
    theory/plan/mesh.py theory/plan/noise_scale.py theory/plan/on_chip.py theory/plan/one_device.py
    theory/plan/operators.py theory/plan/planner.py theory/plan/ranks.py theory/plan/roofline.py
    theory/plan/shards.py theory/plan/strategies.py theory/plan/tensor_lines.py theory/plan/topology.py
    theory/plan/transformer.py
"""
HEADERS = """
    activation.h describe.h error.h fold.h instructions.h integers.h math.h monoid.h operators.h
    path_counter.h plan.h pull.h rows.h
    score.h tensor_view.h traits.h
    cpu/fold.h cpu/fold_backward.h cpu/fold_forward.h cpu/isa.h cpu/matmul.h cpu/modified_scores.h
    cpu/pack.h
    cpu/panels.h
    cpu/program.h cpu/thread_pool.h cpu/tiles.h
    device/arch/approximate.cuh device/arch/async_copy.cuh device/arch/barrier.cuh device/arch/cluster.cuh
    device/arch/element.cuh device/arch/flag.cuh device/arch/mma.cuh device/arch/reduce_add.cuh
    device/arch/shared_memory.cuh device/arch/tma.cuh device/arch/warpgroup.cuh device/arch/wgmma.cuh
    device/block/accumulate.cuh device/block/bias_tile.cuh device/block/copy_tile.cuh
    device/block/elements.cuh device/block/fast_real.cuh device/block/fold_fragment.cuh
    device/block/fragment.cuh device/block/fragment_scores.cuh device/block/matrix.cuh
    device/block/pull_fragment.cuh device/block/ring.cuh device/block/shared_tile.cuh
    device/block/tile.cuh device/block/warp_operand.cuh
    device/contraction/contraction_sm80.cuh device/contraction/contraction_sm90.cuh
    device/contraction/fold_epilogue.cuh device/contraction/gradient_epilogue.cuh
    device/contraction/keeping_epilogue_sm90.cuh device/contraction/payload_epilogue.cuh
    device/contraction/product_epilogue_sm90.cuh device/contraction/quad_stores_sm80.cuh
    device/contraction/program_epilogue.cuh device/contraction/program_sm80.cuh
    device/contraction/program_sm90.cuh
    device/contraction/row_order.cuh device/contraction/slab_stores_sm90.cuh
    device/contraction/weights_to_gradients.cuh
    device/program/element_real.cuh device/program/functions.h device/program/law_claims.h
    device/program/modified_scores.cuh
    device/program/score_element.h device/program/statistics.h device/resident/attend.cuh
    device/resident/attention_rows.cuh
    device/resident/combine_splits.cuh device/resident/fold_backward_pass_sm90.cuh
    device/resident/fold_backward_sm80.cuh device/resident/fold_backward_sm90.cuh
    device/resident/fold_few_rows_sm90.cuh device/resident/fold_forward_sm80.cuh
    device/resident/fold_forward_sm90.cuh device/resident/kept.cuh device/resident/modified_sm80.cuh
    device/resident/modified_sm90.cuh device/resident/repair.cuh
    device/resident/row_fragment.cuh device/resident/row_residuals.cuh device/resident/strided_lines.cuh
    device/schedule/handover.cuh device/schedule/last_round.h device/schedule/packed_schedule.cuh
    device/schedule/packing.h device/schedule/parts.h device/schedule/schedule.cuh
    device/schedule/tile_schedule.cuh device/schedule/turns.cuh
    device/simt/fold_backward_simt.cuh device/simt/fold_forward_simt.cuh device/simt/jsd_rows.cuh
    device/simt/jsd_rows_sm90.cuh
    device/simt/modified_simt.cuh
    device/simt/monoid_simt.cuh
    device/simt/program_narrow.cuh
    device/simt/program_simt.cuh
    device/simt/row_prologue.cuh device/simt/sink_gradient.cuh
    device/warp/lanes.cuh
    launch/combine_splits.cuh launch/contraction_schedule.h launch/contraction_sm80.cuh
    launch/contraction_sm90.cuh launch/dense_lines.h launch/device_facts.cuh
    launch/driver.cuh
    launch/fold_backward_pass_sm90.cuh
    launch/fold_backward_simt.cuh launch/fold_backward_sm80.cuh launch/fold_backward_sm90.cuh
    launch/fold_epilogue.cuh launch/fold_few_rows_sm90.cuh launch/fold_forward_simt.cuh
    launch/fold_forward_sm80.cuh launch/fold_forward_sm90.cuh launch/fold_shape.cuh
    launch/gradient_epilogue.cuh launch/keeping_epilogue_sm90.cuh launch/last_round.h launch/launch.h
    launch/launch_kernel.cuh launch/loaded_kernels.cuh
    launch/packing.h launch/payload_epilogue.cuh launch/repair.cuh launch/row_prologue.cuh
    launch/row_residuals.cuh launch/sink_gradient.cuh launch/tensor_map.cuh launch/tensors.cuh
    launch/weights_to_gradients.cuh
    monoids/argmax.h monoids/cross_entropy.h monoids/distillation.h monoids/log_probs.h monoids/logsumexp.h
    monoids/products.h monoids/sum.h monoids/weighted_sum.h ops/attention.h ops/cross_entropy.h
    ops/distillation.h ops/gated_mlp.h ops/log_probs.h ops/logsumexp.h ops/matrix.h ops/mlp.h
    ops/modified_attention.h ops/ranks.h ops/rows.h ops/sequences.h ops/statistics.h
    ops/stored_scores.h
    rtc/algorithm rtc/cmath rtc/concepts rtc/cstdint rtc/cstring rtc/cuda_bf16.h rtc/cuda_fp16.h
    rtc/limits rtc/type_traits
"""
CMAKE_PACKAGE = "monoidreduceConfig.cmake monoidreduceConfigVersion.cmake"
BUILD = """
    CHANGELOG.md CMakeLists.txt LICENSE MANIFEST.in README.md pyproject.toml setup.py
    cmake/Compiler.cmake cmake/CppTests.cmake cmake/CpuIsa.cmake cmake/CudaKernels.cmake
    cmake/CudaToolchain.cmake
    cmake/HostCode.cmake cmake/Install.cmake cmake/PythonModule.cmake cmake/Sources.cmake
    cmake/ptxas_gate.sh
"""
SOURCES = """
    check.h operators.cpp path_counter.cpp
    bindings/calls.h bindings/dlpack_exchange.h bindings/python.cpp bindings/tensor_caster.h
    cpu/attention.cpp cpu/combine_states.cpp cpu/cross_entropy.cpp cpu/dispatch.cpp cpu/distillation.cpp
    cpu/engine.h
    cpu/fold_tiles.cpp cpu/gated_mlp.cpp cpu/log_probs.cpp cpu/logsumexp.cpp cpu/mlp.cpp
    cpu/modified_attention.cpp
    cpu/reduce_losses.cpp cpu/row_centres.h cpu/sequences.cpp cpu/sink_gradient.h
    cpu/statistics.cpp cpu/with_accumulator.h
    cuda/attention.cu cuda/attention_passes.cuh cuda/combine_states.cu cuda/copy_fitted.cu
    cuda/cross_entropy.cu cuda/cross_entropy_passes.cuh cuda/distillation.cu cuda/distillation_passes.cuh
    cuda/element.h cuda/engine.h cuda/gated_mlp.cu cuda/gathered_rows.h cuda/loaded_kernels.cu
    cuda/log_probs.cu cuda/log_probs_passes.cuh cuda/logit_scores.cuh
    cuda/logsumexp.cu cuda/logsumexp_folds.cuh cuda/mlp.h cuda/mlp_backward.cu cuda/mlp_forward.cu
    cuda/mlp_passes.cuh cuda/modified_attention.cu cuda/modified_passes.cuh cuda/modified_scores.cuh
    cuda/natural.cuh cuda/operator.h cuda/order_rows.cu
    cuda/program_passes.cuh cuda/reduce_losses.cu cuda/scale_rows.cu cuda/sequences.cu cuda/statistics.cu
    cuda/sm80/attention_backward.cu cuda/sm80/attention_forward.cu cuda/sm80/cross_entropy_forward.cu
    cuda/sm80/cross_entropy_gradient.cu cuda/sm80/distillation_forward.cu cuda/sm80/distillation_gradient.cu
    cuda/sm80/log_probs.cu cuda/sm80/logsumexp.cu
    cuda/sm80/mlp_backward.cu cuda/sm80/mlp_backward.cuh cuda/sm80/mlp_backward_tf32.cu
    cuda/sm80/mlp_few_rows.cu cuda/sm80/mlp_forward.cu cuda/sm80/mlp_gradient.cu cuda/sm80/mlp_hidden.cu
    cuda/sm80/modified_attention.cu cuda/sm80/statistics.cu cuda/sm80/tiles.h
    cuda/sm90/attention_backward.cu cuda/sm90/attention_few_rows.cu cuda/sm90/attention_forward.cu
    cuda/sm90/backward_kernels.cuh cuda/sm90/cross_entropy_forward.cu cuda/sm90/distillation_forward.cu
    cuda/sm90/distillation_gradient.cu cuda/sm90/jsd_rows.cu cuda/sm90/log_probs.cu cuda/sm90/logsumexp.cu
    cuda/sm90/loss_gradients.cu cuda/sm90/mlp_backward.cu
    cuda/sm90/mlp_few_rows.cu cuda/sm90/mlp_forward.cu cuda/sm90/mlp_gradient.cu cuda/sm90/mlp_hidden.cu
    cuda/sm90/modified_attention.cu cuda/sm90/score_product.cu cuda/sm90/statistics.cu
    plan/attention.cpp plan/attention.h plan/check.h plan/losses.cpp plan/mlp.cpp plan/plan.cpp plan/plan.h
    plan/text.cpp plan/tiles.h
"""
INFO = f"monoidreduce-{mr.__version__}.dist-info/"


def files(folder: str, names: str) -> set[str]:
    return {folder + name for name in names.split()}


def test_wheel(dist):
    (wheel,) = dist.glob("monoidreduce-*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) == (
        files("monoidreduce/", PYTHON)
        | files("monoidreduce/", f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
        | files("monoidreduce/include/monoidreduce/", HEADERS)
        | files("monoidreduce/share/cmake/monoidreduce/", CMAKE_PACKAGE)
        | files(INFO, "METADATA RECORD WHEEL entry_points.txt top_level.txt licenses/LICENSE")
    )


def test_source_distribution(dist):
    (sdist,) = dist.glob("monoidreduce-*.tar.gz")
    with tarfile.open(sdist) as archive:
        found = {member.name.split("/", 1)[1] for member in archive if member.isfile()}
    metadata = {name for name in found if re.match(r"PKG-INFO$|setup\.cfg$|monoidreduce\.egg-info/", name)}
    assert found - metadata == (
        files("", BUILD)
        | files("monoidreduce/", PYTHON)
        | files("csrc/", SOURCES)
        | files("csrc/include/monoidreduce/", HEADERS)
        | files("cmake/package/", CMAKE_PACKAGE)
    )


def test_metadata(dist):
    (wheel,) = dist.glob("monoidreduce-*.whl")
    metadata = zipfile.ZipFile(wheel).read(INFO + "METADATA").decode()
    assert re.findall(r"^Requires-Dist: ([^;\n]*)$", metadata, re.MULTILINE) == ["torch>=2.6"]
    assert re.search(r"^License-Expression: Apache-2\.0$", metadata, re.MULTILINE)
