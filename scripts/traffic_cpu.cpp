// One pass of the CPU engine for scripts/measure_traffic_cpu.py, which runs it under valgrind: float32, one thread.
//
//   traffic_cpu copy|attention|cross_entropy forward|backward ROWS COLUMNS WIDTH FLUSHED
//
// First it prints the tile of the pass, the rows that are side by side, and the columns of a step.
// Only the pass is counted, and after it a sum over FLUSHED bytes. That writes back what the pass left dirty in the
// simulated cache; its own lines are known, and the script subtracts them.
#include <valgrind/callgrind.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#include "cpu/engine.h"
#include "monoidreduce/cpu/panels.h"
#include "monoidreduce/operators.h"

namespace mr = monoidreduce;
namespace engine = monoidreduce::cpu::MR_CPU_ISA;

// Tensors, then the engine's scratch memory are a stack in one piece, so that counts do not depend on the C library's
// allocator. Its alignment is that of the largest cache: sets times lines.
alignas(1 << 18) static char arena[64 << 20];
static std::size_t used = 0;
void* operator new(std::size_t size, std::align_val_t) {
  void* const data = arena + used;
  used += (size + 63) / 64 * 64;
  if (used > sizeof arena) std::abort();
  return data;
}
void operator delete(void* data, std::align_val_t) noexcept {
  if (data) used = static_cast<std::size_t>(static_cast<char*>(data) - arena);
}

namespace {

// Memory from a line's boundary on. It is never freed.
template <class T>
T* filled(std::int64_t count, T value) {
  T* data = static_cast<T*>(operator new(count * sizeof(T), std::align_val_t(64)));
  std::fill_n(data, count, value);
  return data;
}

float* drawn(std::int64_t count) {
  float* data = filled(count, 0.0f);
  std::uint32_t state = 1;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    data[i] = static_cast<float>(state >> 8) * 0x1p-24f - 0.5f;
  }
  return data;
}

mr::TensorView vector(void* data, std::int64_t size, mr::DType dtype = mr::DType::kFloat32) {
  return {.data = data, .rank = 1, .size = {size}, .stride = {1}, .dtype = dtype};
}
mr::TensorView matrix(std::int64_t rows, std::int64_t width) {
  return {.data = drawn(rows * width), .rank = 2, .size = {rows, width}, .stride = {width, 1}};
}
mr::TensorView head(std::int64_t rows, std::int64_t width) {
  return {.data = drawn(rows * width),
          .rank = 4,
          .size = {1, 1, rows, width},
          .stride = {rows * width, rows * width, width, 1}};
}
mr::TensorView of_rows(float* data, std::int64_t rows) {
  return {.data = data, .rank = 3, .size = {1, 1, rows}, .stride = {rows, rows, 1}};
}

template <class Pass>
void count(std::int64_t flushed, Pass pass) {
  const std::vector<char> bytes(flushed, 1);
  CALLGRIND_START_INSTRUMENTATION;
  CALLGRIND_ZERO_STATS;
  pass();
  std::uint64_t lines = 0;
  for (std::int64_t i = 0; i < flushed; i += 64) lines += bytes[i];
  CALLGRIND_STOP_INSTRUMENTATION;
  CALLGRIND_DUMP_STATS;
  if (lines == 0) std::abort();  // so that the loop is not left out
}

void print_tile(const mr::FoldProblem& problem, bool backward) {
  mr::CpuTiles tiles;
  engine::run(mr::cpu::TileQuery{problem, false, tiles}, {.threads = 1});
  const mr::TileSize tile = backward ? tiles.backward : tiles.forward;
  std::printf("%lld %lld %d %lld\n", static_cast<long long>(tile.rows), static_cast<long long>(tile.columns),
              engine::kPanel<float>, static_cast<long long>(engine::kColumnStep));
}

void attention(bool backward, std::int64_t rows, std::int64_t columns, std::int64_t width,
               std::int64_t flushed) {
  mr::AttentionForward x{};
  x.q = head(rows, width), x.k = head(columns, width), x.v = head(columns, width), x.out = head(rows, width);
  x.lse = of_rows(filled(rows, std::log(float(columns))), rows);
  x.lse_low = of_rows(filled(rows, 0.0f), rows);
  x.options.scale = 1 / std::sqrt(double(width));
  print_tile(mr::attention_problem(x), backward);
  if (!backward) return count(flushed, [&] { engine::run(x, {}); });
  mr::AttentionBackward y{};
  y.q = x.q, y.k = x.k, y.v = x.v, y.out = x.out, y.lse = x.lse, y.lse_low = x.lse_low, y.options = x.options;
  y.grad_out = head(rows, width);
  y.d_q = head(rows, width), y.d_k = head(columns, width), y.d_v = head(columns, width);
  count(flushed, [&] { engine::run(y, {}); });
}

void cross_entropy(bool backward, std::int64_t rows, std::int64_t columns, std::int64_t width,
                   std::int64_t flushed) {
  mr::CrossEntropyForward x{};
  x.x = matrix(rows, width), x.weight = matrix(columns, width);
  x.target = vector(filled<std::int64_t>(rows, 1), rows, mr::DType::kInt64);
  x.lse = vector(filled(rows, std::log(float(columns))), rows), x.lse_low = vector(filled(rows, 0.0f), rows);
  x.loss = vector(filled(rows, 0.0f), rows);
  print_tile(mr::cross_entropy_problem(x), backward);
  if (!backward) return count(flushed, [&] { engine::run(x, {}); });
  mr::CrossEntropyBackward y{};
  y.x = x.x, y.weight = x.weight, y.target = x.target, y.lse = x.lse, y.lse_low = x.lse_low;
  y.grad_loss = vector(filled(rows, 1.0f), rows);
  y.d_x = matrix(rows, width), y.d_weight = matrix(columns, width);
  count(flushed, [&] { engine::run(y, {}); });
}

// out = a + b, whose lines are known: a count to check the tool with.
void copy(std::int64_t rows, std::int64_t width, std::int64_t flushed) {
  const std::int64_t size = rows * width;
  const float *a = drawn(size), *b = drawn(size);
  float* out = filled(size, 0.0f);
  count(flushed, [&] {
    for (std::int64_t i = 0; i < size; ++i) out[i] = a[i] + b[i];
  });
}

}  // namespace

int main(int, char** argv) {
  const bool backward = std::strcmp(argv[2], "backward") == 0;
  const std::int64_t rows = std::atoll(argv[3]), columns = std::atoll(argv[4]), width = std::atoll(argv[5]),
                     flushed = std::atoll(argv[6]);
  if (std::strcmp(argv[1], "attention") == 0) attention(backward, rows, columns, width, flushed);
  if (std::strcmp(argv[1], "cross_entropy") == 0) cross_entropy(backward, rows, columns, width, flushed);
  if (std::strcmp(argv[1], "copy") == 0) copy(rows, width, flushed);
}
