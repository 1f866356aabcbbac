// Tensors of sizes that are no multiples of 8 on their way to the tensor cores, padded, and back, cut.
//
// torch fills and copies in two passes. With these, attention of width 59 took 1.34 times as long as of width 64 (H100, 4 x 32
// heads of 4096, forward and backward).
#include "element.h"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "monoidreduce/ops/rows.h"
#include "operator.h"

namespace monoidreduce::cuda {
namespace {

constexpr int kThreads = 256, kChunk = 16;     // bytes of the result that a thread writes at once
constexpr int kRowsUnit = kChunk / 2;          // so many rows, of any width and type, end with a whole chunk
constexpr std::int64_t kBlockElements = 8192;  // at least, if there are as many

// Where a row of the result comes from.
struct SourceRow {
  const char* data;
  std::int64_t row;  // of its matrix
};

__device__ SourceRow source_row(const Tensor& from, const Tensor& to, std::int64_t row) {
  const std::int64_t matrix = row / to.size[2], own = row - matrix * to.size[2], batch = matrix / to.size[1],
                     head = matrix - batch * to.size[1];
  return {from.data + batch * from.stride[0] + head * from.stride[1] + own * from.stride[2], own};
}

// A block makes rows of the result, which is contiguous: rows_of_block, a multiple of kRowsUnit, of all its matrices' one after
// another. A thread reads the elements of a chunk one by one, since rows of the source begin anywhere, and writes them at once.
template <class From, class To>
__global__ void __launch_bounds__(kThreads)
    copy_fitted_kernel(const __grid_constant__ Tensor from, const __grid_constant__ Tensor to,
                       unsigned rows_of_block) {
  constexpr int kElements = kChunk / sizeof(To);
  __shared__ SourceRow first;
  const std::int64_t rows = to.size[0] * to.size[1] * to.size[2],
                     row0 = std::int64_t{blockIdx.x} * rows_of_block;
  if (threadIdx.x == 0) first = source_row(from, to, row0);
  __syncthreads();
  const unsigned width = static_cast<unsigned>(to.size[3]);
  const std::int64_t elements =
      width * (row0 + rows_of_block < rows ? rows_of_block : rows - row0);  // of the block
  To* const target = reinterpret_cast<To*>(to.data) + row0 * width;
  for (std::int64_t begin = threadIdx.x * kElements; begin < elements; begin += kThreads * kElements) {
    const unsigned row = static_cast<unsigned>(begin) / width;
    unsigned column = static_cast<unsigned>(begin) - row * width;
    SourceRow source = first.row + row < to.size[2]
                           ? SourceRow{first.data + row * from.stride[2], first.row + row}
                           : source_row(from, to, row0 + row);
    const char* from_where[kElements];  // null: the element is 0
#pragma unroll
    for (int k = 0; k < kElements; ++k) {
      const bool inside = column < from.size[3] && source.row < from.size[2] && begin + k < elements;
      from_where[k] = inside ? source.data + column * from.stride[3] : nullptr;
      if (++column == width) {
        column = 0;
        source.data += from.stride[2];
        if (++source.row == to.size[2]) source = source_row(from, to, row0 + (begin + k + 1) / width);
      }
    }
    From element[kElements];
#pragma unroll
    for (int k = 0; k < kElements; ++k)
      element[k] = from_where[k] ? *reinterpret_cast<const From*>(from_where[k]) : From(0.f);
    union {
      To elements[kElements];
      uint4 words;
    } chunk;
#pragma unroll
    for (int k = 0; k < kElements; ++k) chunk.elements[k] = static_cast<To>(static_cast<float>(element[k]));
    if (begin + kElements <= elements) {
      *reinterpret_cast<uint4*>(target + begin) = chunk.words;
      continue;
    }
#pragma unroll
    for (int k = 0; k < kElements; ++k)
      if (begin + k < elements) target[begin + k] = chunk.elements[k];
  }
}

}  // namespace

void copy_fitted(const FittedCopy& x, const Launch& launch) {
  const DeviceGuard device(x.x.cuda_device);
  const std::int64_t width = x.out.size[3], rows = x.out.size[0] * x.out.size[1] * x.out.size[2];
  if (rows * width == 0) return;
  const std::int64_t units = (kBlockElements + kRowsUnit * width - 1) / (kRowsUnit * width),
                     rows_of_block = units * kRowsUnit, blocks = (rows + rows_of_block - 1) / rows_of_block;
  HalvesAndFloat::with(x.x.dtype, [&](auto from) {
    HalvesAndFloat::with(x.out.dtype, [&](auto to) {
      launch_kernel("copy_fitted", &copy_fitted_kernel<decltype(from), decltype(to)>, blocks_for(blocks),
                    kThreads, 0, launch.stream, device_tensor(x.x), device_tensor(x.out),
                    static_cast<unsigned>(rows_of_block));
    });
  });
}

}  // namespace monoidreduce::cuda
