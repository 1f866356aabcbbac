// Tests the operands of wgmma as Hopper's kernels use them, each with probe matrices. Operands are loaded by TMA, written to
// shared memory from registers, or in registers; either their depth or their lines are adjacent in memory; in the widths that
// kernels use. Needs no Python:
//   nvcc -std=c++20 -O2 -gencode=arch=compute_90a,code=sm_90a -Icsrc/include tests/cpp/test_operands_sm90.cu -o test_operands_sm90
//   ./test_operands_sm90
#include <iostream>
#include <type_traits>

#include "monoidreduce/device/arch/warpgroup.cuh"
#include "monoidreduce/device/block/fragment.cuh"
#include "monoidreduce/device/schedule/schedule.cuh"
#include "monoidreduce/launch/tensor_map.cuh"
#include "operand_probes.h"

namespace monoidreduce::test {

// Where operands come from: a tile with the depth along its width, or along its rows (device/block/shared_tile.cuh). The left
// operand may also be a fragment in registers; the right one may be along the rows of a tile to which fragments were stored.
enum class Left { kAlongWidth, kAlongRows, kRegisters };
enum class Right { kAlongWidth, kAlongRows, kStored };

// kFirst: the first column of the right tile that the product uses, if the depth is along the tile's rows.
template <class E_, Left kLeft_, Right kRight_, int kRows_, int kColumns_, int kDepth_, int kFirst_>
struct Operands {
  using E = E_;
  static constexpr Left kLeft = kLeft_;
  static constexpr Right kRight = kRight_;
  static constexpr int kRows = kRows_, kColumns = kColumns_, kDepth = kDepth_, kFirst = kFirst_;
  static constexpr int kThreads = kRows / kFragmentRows * kWarpgroup;
  static constexpr bool kLeftTransposed = kLeft == Left::kAlongRows,
                        kRightTransposed = kRight != Right::kAlongWidth;
  static constexpr bool kLeftLoaded = kLeft != Left::kRegisters, kRightLoaded = kRight != Right::kStored;

  static constexpr int whole_slabs(int elements) { return (elements + kSlab - 1) / kSlab * kSlab; }
  static constexpr int kTileColumns = whole_slabs(kFirst + kColumns);
  using LeftTile =
      std::conditional_t<kLeftTransposed, SharedTile<kDepth, kRows>, SharedTile<kRows, whole_slabs(kDepth)>>;
  using RightTile = std::conditional_t<kRightTransposed, SharedTile<kDepth, kTileColumns>,
                                       SharedTile<kColumns, whole_slabs(kDepth)>>;
  static_assert(kRightTransposed || kFirst == 0);
  static_assert(kRightLoaded || kDepth == kRows);  // each warpgroup stores a fragment

  static std::string name() {
    constexpr const char *kLeftNames[] = {"along width", "along rows", "registers"},
                         *kRightNames[] = {"along width", "along rows", "stored"};
    return message(monoidreduce::name(kDType<E>), ", left ", kLeftNames[int(kLeft)], ", right ",
                   kRightNames[int(kRight)], ", ", kRows, " x ", kColumns, " from ", kFirst, " x ", kDepth);
  }
};

struct Arguments {
  arch::TensorMap left, right;  // for operands that TMA loads
  // Values of operands that come from fragments: [rows, depth] and [depth, columns of the tile].
  const float *left_values, *right_values;
  float* product;  // [rows, columns]
};

template <class O>
struct alignas(kSharedAlignment) Memory {
  unsigned char left[O::LeftTile::kBytes], right[O::RightTile::kBytes];
  arch::Mbarrier arrived;
};

// The warpgroup's 64 rows of a matrix, as words of E.
template <class E, int kWidth>
__device__ __forceinline__ void read_fragment(std::uint32_t (&words)[kWidth / 4], const float* values,
                                              int row0) {
  float fragment[kWidth / 2];
#pragma unroll
  for (int i = 0; i < kWidth / 2; ++i)
    fragment[i] = values[(row0 + fragment_row(row_of_element(i))) * kWidth + fragment_column(i)];
  round_fragment<E>(words, fragment);
}

// product = left right, in one wgmma group.
template <class O>
__global__ void __launch_bounds__(O::kThreads, 1) probe_kernel(const __grid_constant__ Arguments p) {
  using E = typename O::E;
  extern __shared__ unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<Memory<O>*>(
      shared_bytes + (-arch::shared_address(shared_bytes) & (kSharedAlignment - 1)));
  if (threadIdx.x == 0) {
    arch::init(&memory.arrived, 1);
    arch::fence_init();
    constexpr int kBytes =
        (O::kLeftLoaded ? O::LeftTile::kBytes : 0) + (O::kRightLoaded ? O::RightTile::kBytes : 0);
    arch::arrive_expect(&memory.arrived, kBytes);
    if constexpr (O::kLeftLoaded)
      typename O::LeftTile{memory.left}.load(p.left, {0, 0, 0, 0}, &memory.arrived);
    if constexpr (O::kRightLoaded)
      typename O::RightTile{memory.right}.load(p.right, {0, 0, 0, 0}, &memory.arrived);
  }
  const int warpgroup = arch::uniform(threadIdx.x / kWarpgroup), row0 = warpgroup * kFragmentRows;
  [[maybe_unused]] std::uint32_t words[O::kDepth / 4];
  if constexpr (!O::kLeftLoaded) read_fragment<E, O::kDepth>(words, p.left_values, row0);
  if constexpr (!O::kRightLoaded) {
    std::uint32_t stored[O::kTileColumns / 4];
    read_fragment<E, O::kTileColumns>(stored, p.right_values, row0);
    store_fragment<O::kDepth>(arch::shared_address(memory.right), row0, stored);
    arch::fence_async_shared();
  }
  __syncthreads();
  arch::wait(&memory.arrived, 0);

  using LeftOperand = std::conditional_t<O::kLeftTransposed, AlongRows<O::kDepth>, AlongWidth<O::kRows>>;
  using RightOperand = std::conditional_t<O::kRightTransposed, AlongRows<O::kDepth>, AlongWidth<O::kColumns>>;
  const int own = warpgroup * (O::kLeftTransposed ? O::kDepth : kFragmentRows) * kLineBytes;
  const LeftOperand left(arch::shared_address(memory.left) + own);
  const RightOperand right(arch::shared_address(memory.right) + O::kFirst / kSlab * O::kDepth * kLineBytes +
                           O::kFirst % kSlab * static_cast<int>(sizeof(E)));
  float product[O::kColumns / 2];
#pragma unroll
  for (float& x : product) x = -1.f;  // overwritten by the first step
  arch::pin(product);
  arch::fence_wgmma();
#pragma unroll
  for (int k = 0; k < O::kDepth / kProductDepth; ++k) {
    using Product = arch::Wgmma<E, O::kColumns>;
    if constexpr (O::kLeftLoaded) {
      Product::template shared<O::kLeftTransposed, O::kRightTransposed>(product, left[k], right[k], k > 0);
    } else {
      Product::template registers<O::kRightTransposed>(product, &words[4 * k], right[k], k > 0);
    }
  }
  arch::commit_wgmma();
  arch::wait_wgmma<0>();
  arch::pin(product);
#pragma unroll
  for (int i = 0; i < O::kColumns / 2; ++i)
    p.product[(row0 + fragment_row(row_of_element(i))) * O::kColumns + fragment_column(i)] = product[i];
}

template <class O>
void check(Checks& checks) {
  constexpr DType kElement = kDType<typename O::E>;
  for (const Probe& probe : operand_probes(O::kRows, O::kColumns, O::kDepth)) {
    checks.section(O::name(), probe.name);
    const Matrix columns = probe.right.within(O::kRightTransposed ? O::kTileColumns : O::kColumns, O::kFirst);
    const DeviceTensor left((O::kLeftTransposed ? probe.left.transposed() : probe.left).tensor(),
                            O::kLeftLoaded ? kElement : DType::kFloat32),
        right((O::kRightTransposed ? columns : columns.transposed()).tensor(),
              O::kRightLoaded ? kElement : DType::kFloat32),
        product = no_product(O::kRows, O::kColumns);
    Arguments arguments{.left_values = static_cast<const float*>(left.view().data),
                        .right_values = static_cast<const float*>(right.view().data),
                        .product = static_cast<float*>(product.view().data)};
    const auto map = [](const DeviceTensor& tile) {
      return sm90::tensor_map(tile.view(), static_cast<int>(tile.view().size[2]));
    };
    if (O::kLeftLoaded) arguments.left = map(left);
    if (O::kRightLoaded) arguments.right = map(right);
    launch_kernel("probe_kernel", &probe_kernel<O>, 1, O::kThreads, sizeof(Memory<O>) + kSharedAlignment,
                  nullptr, arguments);
    check_product(checks, product, probe);
  }
}

template <class E, Left kLeft, Right kRight, int kRows>
struct Sizes {
  Checks& checks;
  template <int kColumns, int kDepth, int kFirst = 0>
  const Sizes& with() const {
    check<Operands<E, kLeft, kRight, kRows, kColumns, kDepth, kFirst>>(checks);
    return *this;
  }
};

template <class E>
void check_element(Checks& checks) {
  using enum Left;
  // Scores of the forward kernels, for a consumer's own rows. Arguments: columns, width.
  Sizes<E, kAlongWidth, Right::kAlongWidth, 64>{checks}
      .template with<128, 64>()
      .template with<128, 128>()
      .template with<96, 128>()
      .template with<192, 128>()
      .template with<64, 256>()
      .template with<80, 256>();
  // Products of whole tiles, in the backward kernels and in the steps of contractions.
  Sizes<E, kAlongWidth, Right::kAlongWidth, 128>{checks}
      .template with<64, 64>()
      .template with<128, 64>()
      .template with<192, 64>()
      .template with<256, 64>()
      .template with<64, 128>()
      .template with<64, 192>()
      .template with<64, 256>();
  Sizes<E, kAlongRows, Right::kAlongWidth, 128>{checks}
      .template with<64, 64>()
      .template with<128, 64>()
      .template with<192, 64>()
      .template with<256, 64>()
      .template with<64, 128>()
      .template with<64, 192>()
      .template with<64, 256>();
  Sizes<E, kAlongWidth, Right::kAlongRows, 128>{checks}
      .template with<64, 64>()
      .template with<192, 64>()
      .template with<256, 64>()
      .template with<64, 128>()
      .template with<64, 192>()
      .template with<64, 256>();
  Sizes<E, kAlongRows, Right::kAlongRows, 128>{checks}.template with<192, 64>().template with<256, 64>();
  // Weights times the payload, and gradients. Arguments: width, columns or rows of a tile.
  Sizes<E, kRegisters, Right::kAlongRows, 128>{checks}
      .template with<64, 64>()
      .template with<128, 64>()
      .template with<192, 64>()
      .template with<256, 64>()
      .template with<256, 80>()
      .template with<128, 96>()
      .template with<64, 128>()
      .template with<128, 128>()
      .template with<128, 192>();
  Sizes<E, kRegisters, Right::kAlongWidth, 128>{checks}
      .template with<64, 128>()
      .template with<128, 128>()
      .template with<256, 64>();
  // Parts of the rows' gradients. Arguments: rows, columns of a tile, the first row.
  Sizes<E, kAlongRows, Right::kStored, 128>{checks}
      .template with<32, 128>()
      .template with<32, 128, 32>()
      .template with<64, 128>()
      .template with<64, 128, 64>();
}

}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce::test;
  Checks checks;
  try {
    check_element<__nv_bfloat16>(checks);
    check_element<__half>(checks);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return checks.finish();
}
