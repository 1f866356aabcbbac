#!/usr/bin/env bash
# Checks this machine's GPU: builds the package in place with CUDA, then runs the GPU tests, compute-sanitizer's
# memcheck and racecheck over small sizes, the benchmark and the demo. A summary comes last. Fails where a step failed.
#
#   scripts/gpu_check.sh [FOLDER [STEP...]]
#
# Logs go to FOLDER (default build/gpu_check). The steps after the build are info, tests, memcheck, cpp, racecheck, bench
# and demo (default: all).
#
# Needs nvcc, CMake and a C++ compiler, and a PYTHON (default python3) with torch for CUDA, pybind11, pytest, numpy
# and hypothesis; with pytest-xdist the tests run in parallel.
set -u
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-python3}")
LOGS=${1:-build/gpu_check}
STEPS=" ${*:2} "
BUILD=build/gpu
PATH=$PATH:/usr/local/cuda/bin
# Every operator in every dtype, and sizes around the tiles: few enough for a tool that slows kernels a hundredfold.
SMALL="test_every_specimen or test_sizes_in_every_dtype or test_fully_masked_rows"
TENSOR_CORES="(sm80 or sm90) and (bfloat16 or deterministic) and (ragged or wide)"
# Functions of one's own, which NVRTC compiles: three folds, two functions of scores and a weight; and those on SIMT.
PROGRAMS="test_slices_of_columns or test_no_sum_depends_on_the_order_of_blocks"
PROGRAMS="$PROGRAMS or (test_score_mod and test_functions and bfloat16 and (alibi or document))"
PROGRAMS="$PROGRAMS or (test_attend and test_weights and bfloat16 and sigmoid) or test_any_width"
# float32 in planes of float16: attention, functions of scores, MLPs, losses and gradients of folds.
PLANES="(test_attention_float32 and test_masks_and_sizes and (one_tile or ragged or padded_59) and (full or causal))"
PLANES="$PLANES or (test_attention_float32 and (test_widths or test_one_gradient_alone))"
PLANES="$PLANES or (test_attention_float32 and test_what_is_not_finite and causal-v-nan)"
PLANES="$PLANES or (test_float32_planes and (sizes1 or test_logsumexp_matmul or test_log_probs))"
PLANES="$PLANES or (test_float32_planes and test_gradients_on_chip and sums and 515)"
PLANES="$PLANES or (test_score_mod_float32 and (test_functions and learned or test_rows_beyond))"
PLANES="$PLANES or (test_mlp_float32 and (wide_sums or test_gated_sizes and ragged))"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
"$PYTHON" -c 'import xdist' 2>/dev/null && PARALLEL="-n 8" || PARALLEL=
mkdir -p "$LOGS"
summary=()
failed=0

# step NAME COMMAND...: runs it with a log of its own and notes how it went.
step() {
  local name=$1 start=$SECONDS verdict=passed
  [[ $name = build || $STEPS =~ ^\ *$ || $STEPS = *" $name "* ]] || return 0
  shift
  echo "== $name"
  "$@" >"$LOGS/$name.log" 2>&1 || { verdict="FAILED ($?)"; failed=1; }
  tail -n 4 "$LOGS/$name.log"
  summary+=("$(printf '%-12s %-14s %4d s' "$name" "$verdict" $((SECONDS - start)))")
}

build() {
  cmake -S . -B "$BUILD" -DPython_EXECUTABLE="$PYTHON" -DMONOIDREDUCE_CUDA=ON -DMONOIDREDUCE_INPLACE=ON \
    -DMONOIDREDUCE_BUILD_TESTS=ON -DCMAKE_CUDA_FLAGS=-lineinfo \
    -DMONOIDREDUCE_CUDA_ARCHS="${MONOIDREDUCE_CUDA_ARCHS:-native}" && cmake --build "$BUILD" --parallel "$(nproc)" &&
    cmake --build "$BUILD" --parallel "$(nproc)" --target test_simt
}

gpu_tests() {
  "$PYTHON" -m pytest -q $PARALLEL -m gpu tests --ignore tests/packaging
}

# The caching allocator would hide an access beyond one tensor that falls into another. A few tests at a time: with the tool each
# takes about half a gigabyte more of the GPU's memory, until its process ends. (64 tests took two minutes on an H200.)
memcheck() {
  local tests
  tests=$("$PYTHON" -m pytest -q --collect-only -m gpu tests --ignore tests/packaging -k "$SMALL or $TENSOR_CORES or $PROGRAMS or $PLANES" | grep ::) &&
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 xargs -d '\n' -n 64 compute-sanitizer --tool memcheck --target-processes all \
      --kernel-name kernel_substring=monoidreduce --error-exitcode 3 \
      "$PYTHON" -m pytest -q $PARALLEL -p no:cacheprovider <<<"$tests"
}

# Of the SIMT kernels, from C++: on those of tensor cores racecheck ends in an internal error. Some of the cases, side by side,
# which took three minutes on an H200.
racecheck() {
  local cases job jobs=() verdict=0
  for cases in small causal "one of each" monoid; do
    compute-sanitizer --tool racecheck --error-exitcode 3 "$BUILD/test_simt" "$cases" &
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || verdict=$?; done
  return "$verdict"
}

step build build
if [ "$failed" = 0 ]; then
  step info "$PYTHON" -m monoidreduce info
  step tests gpu_tests
  step memcheck memcheck
  step cpp "$BUILD/test_simt"
  step racecheck racecheck
  step bench "$PYTHON" bench/run.py --device cuda --out "$LOGS" --plot "$LOGS/bench.png"
  step demo "$PYTHON" -m monoidreduce demo --device cuda --plot "$LOGS/demo.png"
  cat "$LOGS/bench.log" "$LOGS/demo.log" 2>/dev/null | tr '\r' '\n' | grep -v 'step/s'
fi
echo
printf '%s\n' "${summary[@]}"
exit "$failed"
