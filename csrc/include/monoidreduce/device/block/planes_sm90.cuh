// Products of float32 operands on Hopper, with float32's accuracy: of fp16 planes.
//
// A row of an operand is split into two planes and a power of two, x = scale (high + low), which together have
// 22 bits of the row's largest element (contraction/split_planes.cuh). A product is three products of planes:
//
//   a . b = scale_a scale_b (high_a . high_b + high_a . low_b + low_a . high_b)
//
// What low_a . low_b would add is below float32's rounding.
//
// Tensor cores truncate a running sum after every instruction, a relative 2^-24 each time and always towards
// zero. So no running sum is long: dot products are added up in pieces of 64 of the width, and sums over lines
// in tiles of 64 lines. Threads add these up in float32, rounded to nearest.
//
// A sum over lines cannot have a scale for each of them, so its weights take them in: w_ij = weight_ij scale_j.
// Each row i of a tile then has a power of two that brings its largest |w_ij| to [2^14, 2^15), before w is split
// to planes. So what a weight loses is 2^-22 of itself, or 2^-39 of the largest one of its row and tile,
// however far the scales differ and whichever of the lines a row has weights for.
#pragma once

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/fold_fragment.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/block/shared_tile.cuh"

namespace monoidreduce::sm90 {

inline constexpr int kPlaneLines = 64;  // lines of a tile

// The maps of an operand that is split: [batch, heads, rows, 2 * width of a plane + 8] fp16.
struct PlaneMaps {
  arch::TensorMap planes,
      scales;  // boxes of kPlaneLines lines: a slab's, and the 16 bytes that begin with the scale
};

// The last 16 bytes of a split row.
struct alignas(16) RowScale {
  float scale, unused[3];
};

// A tile of float32 rows in shared memory: the high plane's slabs, then the low plane's slabs, then the rows' scales.
template <int kWidth>
struct alignas(1024) PlaneTile {
  using Planes = SharedTile<kPlaneLines, 2 * kWidth>;
  static constexpr int kLineOfBoth = 2 * kWidth * 2 + sizeof(RowScale), kBytes = kPlaneLines * kLineOfBoth;
  unsigned char planes[Planes::kBytes];
  RowScale scales[kPlaneLines];

  __device__ __forceinline__ void load(const PlaneMaps& from, arch::Box at, arch::Mbarrier* arrived) {
    Planes{planes}.load(from.planes, at, arrived);
    at.inner += 2 * kWidth;
    arch::load(scales, from.scales, at, arrived);
  }
};

// A product of two tiles over their width, 64 x 64.
template <int kWidth>
struct PlaneDots {
  static constexpr int kSteps = kWidth / kProductDepth, kPieces = kWidth / kSlab;
  using Product = arch::Wgmma<__half, kPlaneLines>;
  // The first piece also has the products with low planes. These are small, and come first.
  float piece[kPieces][kPlaneLines / 2];

  // Issues the products; asynchronous, one group.
  __device__ __forceinline__ void multiply(const PlaneTile<kWidth>& left, const PlaneTile<kWidth>& right) {
    const AlongWidth<kPlaneLines> a(arch::shared_address(left.planes)), b(arch::shared_address(right.planes));
#pragma unroll
    for (auto& sums : piece) arch::pin(sums);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Product::template shared<false, false>(piece[0], a[k], b[kSteps + k], k > 0);
      Product::template shared<false, false>(piece[0], a[kSteps + k], b[k], true);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Product::template shared<false, false>(piece[k * kPieces / kSteps], a[k], b[k],
                                             k < kSteps / kPieces || k % (kSteps / kPieces) > 0);
    arch::commit_wgmma();
  }
  // The dot products, once the group is complete. of_rows: the scales of the thread's two rows; of_columns: of
  // the lines of the right tile. The scales are multiplied with each other first: their product leaves float32's
  // range only where the dot product does, too.
  __device__ __forceinline__ void scaled(float (&dots)[kPlaneLines / 2], const float (&of_rows)[2],
                                         const RowScale (&of_columns)[kPlaneLines]) {
#pragma unroll
    for (auto& sums : piece) arch::pin(sums);
#pragma unroll
    for (int i = 0; i < kPlaneLines / 2; ++i) {
      float dot = piece[0][i];
#pragma unroll
      for (int n = 1; n < kPieces; ++n) dot += piece[n][i];
      dots[i] = dot * (of_rows[row_of_element(i)] * of_columns[fragment_column(i)].scale);
    }
    arch::pin(dots);
  }
};

// Weights of a tile's lines, in planes, as the left operand of a product over the lines.
struct PlaneWeights {
  std::uint32_t high[kPlaneLines / 4], low[kPlaneLines / 4];
  float unit[2];  // by which products must be multiplied, for the thread's two rows

  // Takes the scales of the tile's lines into the weights, and splits them.
  __device__ __forceinline__ void split(float (&weights)[kPlaneLines / 2],
                                        const RowScale (&scales)[kPlaneLines]) {
    constexpr int kBias = 127;    // of float32's exponents
    constexpr int kTop = 14;      // the exponent of the largest weight of a row
    constexpr int kOfScale = 13;  // that of the largest element of a split row, with its scale
    // Rows whose largest weight is less than 2^kLeast keep what float32 has there.
    constexpr int kLeast = kTop + kOfScale + 2 - kBias;
    float largest[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < kPlaneLines / 2; ++i) {
      weights[i] *= scales[fragment_column(i)].scale * (1 << kOfScale);
      largest[row_of_element(i)] = fmaxf(largest[row_of_element(i)], fabsf(weights[i]));
    }
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      largest[r] = reduce_lanes<kLanesOfRow>(largest[r], [](float a, float b) { return fmaxf(a, b); });
      const int exponent = ::max((__float_as_int(largest[r]) >> 23) - kBias, kLeast);
      factor[r] = __int_as_float((kTop - exponent + kBias) << 23);
      unit[r] = __int_as_float((exponent - kTop - kOfScale + kBias) << 23);
    }
#pragma unroll
    for (int i = 0; i < kPlaneLines / 4; ++i) {
      const float f = factor[i % 2], x = weights[2 * i] * f, y = weights[2 * i + 1] * f;
      high[i] = arch::pack<__half>(x, y);
      const float2 rounded = arch::unpack<__half>(high[i]);
      low[i] = arch::pack<__half>(x - rounded.x, y - rounded.y);
    }
    arch::pin(high), arch::pin(low);  // a consumer splits before it issues its product
  }
};

// A product of weights and a tile over its lines, 64 x kWidth.
template <int kWidth>
struct PlaneSums {
  using Product = arch::Wgmma<__half, kWidth>;
  float product[kWidth / 2];

  // Issues the products; asynchronous, one group.
  __device__ __forceinline__ void multiply(const PlaneWeights& weights, const PlaneTile<kWidth>& tile) {
    constexpr int kSteps = kPlaneLines / kProductDepth;
    const arch::SharedAddress planes = arch::shared_address(tile.planes);
    const AlongRows<kPlaneLines> high(planes), low(planes + PlaneTile<kWidth>::Planes::kBytes / 2);
    arch::pin(product);
    arch::fence_wgmma();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      Product::template registers<true>(product, &weights.high[4 * k], low[k], k > 0);
      Product::template registers<true>(product, &weights.low[4 * k], high[k], true);
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
      Product::template registers<true>(product, &weights.high[4 * k], high[k], true);
    arch::commit_wgmma();
  }
  // Once the group is complete.
  __device__ __forceinline__ void add_to(float (&sums)[kWidth / 2], const PlaneWeights& weights) {
    arch::pin(product);
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) sums[i] = fmaf(product[i], weights.unit[row_of_element(i)], sums[i]);
  }
};

}  // namespace monoidreduce::sm90
