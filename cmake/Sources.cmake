# Every source file of the project, by how it is compiled. Nothing is globbed: a file that is not listed is not built.

# Compiled once per instruction set, all together (cmake/HostCode.cmake), into the namespace that MR_CPU_ISA names.
set(MONOIDREDUCE_CPU_ISA_SOURCES
    csrc/cpu/attention.cpp
    csrc/cpu/cross_entropy.cpp
    csrc/cpu/distillation.cpp
    csrc/cpu/fold_tiles.cpp
    csrc/cpu/gated_mlp.cpp
    csrc/cpu/log_probs.cpp
    csrc/cpu/reduce_losses.cpp
    csrc/cpu/logsumexp.cpp
    csrc/cpu/modified_attention.cpp
    csrc/cpu/statistics.cpp
    csrc/cpu/mlp.cpp)

# The plans of calls on GPUs. They are plain data without CUDA, and part of every build.
set(MONOIDREDUCE_PLAN_SOURCES
    csrc/plan/attention.cpp
    csrc/plan/jobs.cpp
    csrc/plan/losses.cpp
    csrc/plan/mlp.cpp
    csrc/plan/plan.cpp
    csrc/plan/text.cpp)

# Compiled once, for the oldest processor of the family: argument checks, the choice of device and instruction set.
set(MONOIDREDUCE_HOST_SOURCES
    csrc/operators.cpp
    csrc/path_counter.cpp
    csrc/cpu/combine_states.cpp
    csrc/cpu/dispatch.cpp
    csrc/cpu/sequences.cpp
    ${MONOIDREDUCE_PLAN_SOURCES})

set(MONOIDREDUCE_BINDING_SOURCES csrc/bindings/python.cpp)

# Compiled by nvcc when CUDA is on: kernels with the same PTX for all architectures.
set(MONOIDREDUCE_CUDA_SOURCES
    csrc/cuda/attention.cu
    csrc/cuda/combine_states.cu
    csrc/cuda/copy_fitted.cu
    csrc/cuda/cross_entropy.cu
    csrc/cuda/distillation.cu
    csrc/cuda/gated_mlp.cu
    csrc/cuda/reduce_losses.cu
    csrc/cuda/loaded_kernels.cu
    csrc/cuda/log_probs.cu
    csrc/cuda/logsumexp.cu
    csrc/cuda/mlp_backward.cu
    csrc/cuda/mlp_forward.cu
    csrc/cuda/modified_attention.cu
    csrc/cuda/order_rows.cu
    csrc/cuda/sequences.cu
    csrc/cuda/statistics.cu
    csrc/cuda/target_scores.cu
    csrc/cuda/sm80/attention_forward.cu
    csrc/cuda/sm80/cross_entropy_forward.cu
    csrc/cuda/sm80/cross_entropy_gradient.cu
    csrc/cuda/sm80/distillation_forward.cu
    csrc/cuda/sm80/distillation_gradient.cu
    csrc/cuda/sm80/log_probs.cu
    csrc/cuda/sm80/logsumexp.cu
    csrc/cuda/sm80/mlp_few_rows.cu
    csrc/cuda/sm80/mlp_forward.cu
    csrc/cuda/sm80/mlp_gradient.cu
    csrc/cuda/sm80/mlp_hidden.cu
    csrc/cuda/sm80/modified_attention.cu
    csrc/cuda/sm80/statistics.cu)

# Compiled by nvcc for each architecture separately: from 9.0 on these kernels use other instructions to add to memory
# (device/arch/reduce_add.cuh), or to widen bfloat16.
set(MONOIDREDUCE_CUDA_ARCH_SOURCES
    csrc/cuda/scale_rows.cu
    csrc/cuda/sm80/attention_backward.cu
    csrc/cuda/sm80/mlp_backward.cu
    csrc/cuda/sm80/mlp_backward_tf32.cu)

# Compiled by nvcc for sm_90a only, when CUDA is on and 9.0 is among the architectures. The sources that compile fastest come
# last, so that all processors have work until the end.
set(MONOIDREDUCE_SM90_SOURCES
    csrc/cuda/sm90/attention_backward.cu
    csrc/cuda/sm90/attention_few_rows.cu
    csrc/cuda/sm90/attention_forward.cu
    csrc/cuda/sm90/mlp_backward.cu
    csrc/cuda/sm90/mlp_few_rows.cu
    csrc/cuda/sm90/mlp_forward.cu
    csrc/cuda/sm90/mlp_gradient.cu
    csrc/cuda/sm90/mlp_hidden.cu
    csrc/cuda/sm90/distillation_forward.cu
    csrc/cuda/sm90/distillation_gradient.cu
    csrc/cuda/sm90/log_probs.cu
    csrc/cuda/sm90/logsumexp.cu
    csrc/cuda/sm90/cross_entropy_forward.cu
    csrc/cuda/sm90/loss_gradients.cu
    csrc/cuda/sm90/modified_attention.cu
    csrc/cuda/sm90/jsd_rows.cu
    csrc/cuda/sm90/score_product.cu
    csrc/cuda/sm90/statistics.cu
    csrc/cuda/planes/attention_backward.cu
    csrc/cuda/planes/attention_forward.cu
    csrc/cuda/planes/losses.cu
    csrc/cuda/planes/mlp_backward.cu
    csrc/cuda/planes/mlp_forward.cu
    csrc/cuda/planes/row_gradient.cu
    csrc/cuda/planes/statistics.cu
    csrc/cuda/planes/products.cu
    csrc/cuda/planes/log_probs.cu
    csrc/cuda/planes/distillation.cu
    csrc/cuda/planes/mlp_parts.cu
    csrc/cuda/planes/modified_attention.cu)
