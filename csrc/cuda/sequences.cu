// Computes the listed spans of packed sequences (which columns a row keeps, and vice versa) on the GPU; the
// host never reads them.
#include "monoidreduce/ops/sequences.h"

#include <algorithm>

#include "monoidreduce/launch/launch_kernel.cuh"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256;

// Whether the starts that the calling thread looks at are sound (see Sequences).
__device__ __forceinline__ bool sound(const Sequences& sequences) {
  bool sound = true;
  for (std::int64_t s = threadIdx.x; s <= sequences.count; s += kThreads) sound &= sequences.sound(s);
  return sound;
}

// One thread for each row, then for each column. Every block looks at all starts, because a search among
// unsound ones could leave them. So there is at most one block per SM: a million tokens may have as many
// starts.
__global__ void __launch_bounds__(kThreads)
    sequence_spans_kernel(const __grid_constant__ Sequences rows, const __grid_constant__ Sequences columns,
                          std::int64_t left, std::int64_t right, Span* row_spans, Span* column_spans) {
  const bool all_sound = __syncthreads_and(sound(rows) && sound(columns));
  for (std::int64_t line = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
       line < rows.lines + columns.lines; line += std::int64_t{gridDim.x} * kThreads) {
    const std::int64_t column = line - rows.lines;
    if (column < 0)
      row_spans[line] = all_sound ? unmasked_span(rows, columns, line, left, right) : kUndefined;
    else
      column_spans[column] = all_sound ? unmasked_span(columns, rows, column, right, left) : kUndefined;
  }
}

// Fills a result with NaN if the spans are undefined, because the starts are not sound.
__global__ void __launch_bounds__(kThreads)
    undefine_kernel(const Span* spans, unsigned char* bytes, std::int64_t count) {
  if (spans->begin <= spans->end) return;
  for (std::int64_t n = std::int64_t{blockIdx.x} * kThreads + threadIdx.x; n < count;
       n += std::int64_t{gridDim.x} * kThreads)
    bytes[n] = 0xff;  // all bits set are NaN in every type
}

}  // namespace

template <>
void run(const SequenceSpans& x, const Launch& launch) {
  const DeviceGuard device(x.row_spans.cuda_device);
  const Sequences rows = sequences_of(x.row_starts, x.row_spans),
                  columns = sequences_of(x.column_starts, x.column_spans);
  const std::int64_t lines = rows.lines + columns.lines;
  if (lines == 0) return;
  const std::int64_t blocks =
      std::min<std::int64_t>((lines + kThreads - 1) / kThreads, multiprocessors(x.row_spans.cuda_device));
  launch_kernel("sequence_spans", &sequence_spans_kernel, static_cast<unsigned>(blocks), kThreads, 0,
                launch.stream, rows, columns, x.left, x.right, data<Span>(x.row_spans),
                data<Span>(x.column_spans));
}

template <>
void run(const Undefined& x, const Launch& launch) {
  if (x.row_spans.size[0] == 0 || x.result.numel() == 0) return;
  const DeviceGuard device(x.result.cuda_device);
  launch_kernel("undefine", &undefine_kernel, 4 * multiprocessors(x.result.cuda_device), kThreads, 0,
                launch.stream, static_cast<const Span*>(x.row_spans.data), data<unsigned char>(x.result),
                x.result.numel() * item_size(x.result.dtype));
}

}  // namespace monoidreduce::cuda
