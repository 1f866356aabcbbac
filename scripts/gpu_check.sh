#!/usr/bin/env bash
# Checks this machine's GPU: builds the package in place with CUDA, then runs the GPU tests, compute-sanitizer's
# memcheck and racecheck over small sizes, the benchmark and the demo. A summary comes last; logs go to the folder
# that the first argument names (default build/gpu_check). Fails where a step failed.
#
# Needs nvcc, CMake and a C++ compiler, and a PYTHON (default python3) with torch for CUDA, pybind11, pytest, numpy
# and hypothesis.
set -u
cd "$(dirname "$0")/.."
PYTHON=$(command -v "${PYTHON:-python3}")
LOGS=${1:-build/gpu_check}
BUILD=build/gpu
PATH=$PATH:/usr/local/cuda/bin
# Every operator in every dtype, and sizes around the tiles: few enough for tools that slow kernels a hundredfold.
SMALL="test_every_specimen or test_sizes_in_every_dtype or test_fully_masked_rows"
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$LOGS"
summary=()
failed=0

# step NAME COMMAND...: runs it with a log of its own and notes how it went.
step() {
  local name=$1 start=$SECONDS verdict=passed
  shift
  echo "== $name"
  "$@" >"$LOGS/$name.log" 2>&1 || { verdict="FAILED ($?)"; failed=1; }
  tail -n 4 "$LOGS/$name.log"
  summary+=("$(printf '%-12s %-14s %4d s' "$name" "$verdict" $((SECONDS - start)))")
}

build() {
  cmake -S . -B "$BUILD" -DPython_EXECUTABLE="$PYTHON" -DMONOIDREDUCE_CUDA=ON -DMONOIDREDUCE_INPLACE=ON \
    -DMONOIDREDUCE_CUDA_ARCHS="${MONOIDREDUCE_CUDA_ARCHS:-native}" && cmake --build "$BUILD" --parallel "$(nproc)"
}

gpu_tests() {
  "$PYTHON" -m pytest -q -m gpu tests --ignore tests/packaging "$@"
}

# The caching allocator would hide an access beyond one tensor that falls into another.
sanitize() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool "$1" --kernel-name kernel_substring=monoidreduce \
    --error-exitcode 3 "$PYTHON" -m pytest -q -m gpu tests/test_*.py -k "$SMALL" -p no:cacheprovider
}

step build build
if [ "$failed" = 0 ]; then
  step info "$PYTHON" -m monoidreduce info
  step tests gpu_tests
  step memcheck sanitize memcheck
  step racecheck sanitize racecheck
  step bench "$PYTHON" bench/run.py --device cuda --out "$LOGS"
  step demo "$PYTHON" -m monoidreduce demo --device cuda --plot "$LOGS/demo.png"
  cat "$LOGS/bench.log" "$LOGS/demo.log" | tr '\r' '\n' | grep -v 'step/s'
fi
echo
printf '%s\n' "${summary[@]}"
exit "$failed"
