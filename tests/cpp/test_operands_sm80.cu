// Tests the operands of mma.sync as the sm80 kernels use them (device/block/warp_operand.cuh), each with probe matrices.
// Operands come from tiles that were copied, from tiles that were written from registers, or from registers; with their depth
// along the lines of a tile or across them. Needs no Python:
//   nvcc -std=c++20 -O2 -arch=native -Icsrc/include tests/cpp/test_operands_sm80.cu -o test_operands_sm80
//   ./test_operands_sm80
#include <iostream>
#include <type_traits>

#include "monoidreduce/device/block/copy_tile.cuh"
#include "monoidreduce/device/block/warp_operand.cuh"
#include "monoidreduce/launch/launch_kernel.cuh"
#include "monoidreduce/launch/tensors.cuh"
#include "operand_probes.h"

namespace monoidreduce::test {

// Where the left operand comes from. Its rows are the lines of a tile, or the elements of its lines; or it is a fragment in
// registers; or it is like the first two, in a tile to which fragments were stored.
enum class Left { kLines, kElements, kRegisters, kStoredLines, kStoredElements };
// Where the right operand comes from. Its columns are the lines of a tile, or the elements of its lines; or the lines, where
// the left operand is a fragment.
enum class Right { kLines, kElements, kFragmentLines };

// Eight warps; each has 16 rows of every 64, and half of the columns.
inline constexpr int kThreads = 256, kRows = 128, kFragments = kRows / kFragmentRows;

template <class E_, Left kLeft_, Right kRight_, int kColumns_, int kDepth_>
struct Operands {
  using E = E_;
  static constexpr Left kLeft = kLeft_;
  static constexpr Right kRight = kRight_;
  static constexpr int kColumns = kColumns_, kDepth = kDepth_;
  static constexpr bool kLeftTransposed = kLeft == Left::kElements || kLeft == Left::kStoredElements,
                        kRightTransposed = kRight == Right::kElements;
  static constexpr bool kLeftLoaded = kLeft == Left::kLines || kLeft == Left::kElements;
  // Whether the lines of a float operand are spread when they are copied (copy_tile.cuh). Lines that are then read in the
  // paired order (warp_operand.cuh) come in their natural order; and columns that are read in pairs are in different banks.
  static constexpr bool kFloat = std::is_same_v<E, float>;
  static constexpr bool kLeftSpread = kFloat && kLeft == Left::kElements,
                        kRightSpread = kFloat && kRight == Right::kFragmentLines;

  static constexpr int kLeftLines = kLeftTransposed ? kDepth : kRows,
                       kLeftWidth = kLeftTransposed ? kRows : kDepth,
                       kRightLines = kRightTransposed ? kDepth : kColumns,
                       kRightWidth = kRightTransposed ? kColumns : kDepth;

  static std::string name() {
    constexpr const char *kLeftNames[] = {"lines", "elements", "registers", "stored lines",
                                          "stored elements"},
                         *kRightNames[] = {"lines", "elements", "lines for a fragment"};
    return message(monoidreduce::name(kDType<E>), ", left ", kLeftNames[int(kLeft)], ", right ",
                   kRightNames[int(kRight)], ", ", kColumns, " x ", kDepth);
  }
};

template <class O>
struct Memory {
  unsigned char left[SharedTile<O::kLeftLines, O::kLeftWidth, typename O::E>::kBytes];
  unsigned char right[SharedTile<O::kRightLines, O::kRightWidth, typename O::E>::kBytes];
};

__device__ __forceinline__ int own_line() { return threadIdx.x / 32 % 4 * 16; }  // of every 64

// The warp's lines of fragment f of a matrix of kWidth elements, from `element` on, as words of E.
template <class E, int kWidth, int kWords>
__device__ __forceinline__ void read_fragment(std::uint32_t (&words)[kWords], const float* values, int f,
                                              int element) {
  float fragment[kWords * 4 / sizeof(E)];
#pragma unroll
  for (int i = 0; i < static_cast<int>(kWords * 4 / sizeof(E)); ++i)
    fragment[i] =
        values[(f * kFragmentRows + fragment_row(row_of_element(i))) * kWidth + element + fragment_column(i)];
  round_fragment<E>(words, fragment);
}

// If the left operand comes from fragments, its lines are floats. product: [rows, columns].
template <class O>
__global__ void __launch_bounds__(kThreads, 1)
    probe_kernel(const Lines left_lines, const Lines right_lines, float* product) {
  using E = typename O::E;
  constexpr int kDepth = O::kDepth, kHalfColumns = O::kColumns / 2;
  extern __shared__ __align__(kLineBytes) unsigned char shared_bytes[];
  auto& memory = *reinterpret_cast<Memory<O>*>(shared_bytes);
  const arch::SharedAddress left_tile = arch::shared_address(memory.left),
                            right_tile = arch::shared_address(memory.right);
  const int half = threadIdx.x / 128;
  const float* const left_values = reinterpret_cast<const float*>(left_lines.data);

  if constexpr (O::kLeftLoaded)
    load_tile<kThreads, O::kLeftLines, O::kLeftWidth, E, O::kLeftSpread>(left_tile, left_lines, 0, 0);
  load_tile<kThreads, O::kRightLines, O::kRightWidth, E, O::kRightSpread>(right_tile, right_lines, 0, 0);
  arch::commit_copies();
  arch::wait_copies<0>();
  if constexpr (O::kFloat && O::kLeftLoaded)
    round_tile<kThreads, O::kLeftLines, O::kLeftWidth, O::kLeftSpread>(memory.left);
  if constexpr (O::kLeft == Left::kStoredLines || O::kLeft == Left::kStoredElements) {
    const int element = half * O::kLeftWidth / 2;
#pragma unroll
    for (int f = 0; f < O::kLeftLines / kFragmentRows; ++f) {
      std::uint32_t words[kWordsOf<E, O::kLeftWidth / 4>];
      read_fragment<E, O::kLeftWidth>(words, left_values, f, element);
      store_operand<E, O::kLeftLines>(left_tile, f * kFragmentRows + own_line(), element, words);
    }
  }
  __syncthreads();

  const auto right = [&] {
    if constexpr (O::kRight == Right::kLines) {
      return [operand = ColumnsOfLines<O::kColumns, E>(right_tile).from(half * kHalfColumns, 0)](
                 auto& words, int k, int n) { operand.load(words, n, k); };
    } else if constexpr (O::kRight == Right::kElements) {
      return [operand = ColumnsOfElements<kDepth, E>(right_tile).from(0, half * kHalfColumns)](
                 auto& words, int k, int n) { operand.load(words, k, n); };
    } else {
      return [operand = ColumnsOfFragmentLines<O::kColumns, E>(right_tile), half](auto& words, int k, int n) {
        operand.load(words, half * kHalfColumns + n, k);
      };
    }
  }();
  float sums[kFragments][kHalfColumns / 2];
  clear(sums);
  if constexpr (O::kLeft == Left::kRegisters) {
    std::uint32_t fragments[kFragments][kWordsOf<E, kDepth / 2>];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) read_fragment<E, kDepth>(fragments[f], left_values, f, 0);
    multiply<E, kDepth>(
        sums, [&](auto& words, int f, int k) { operand_of_fragment<E>(words, fragments[f], k); }, right);
  } else if constexpr (O::kLeftTransposed) {
    const auto left =
        RowsOfElements<kDepth, E, O::kLeft == Left::kStoredElements>(left_tile).from(0, own_line());
    multiply<E, kDepth>(
        sums, [&](auto& words, int f, int k) { left.load(words, k, f * kFragmentRows); }, right);
  } else {
    const auto left = RowsOfLines<kRows, E>(left_tile).from(own_line(), 0);
    multiply<E, kDepth>(
        sums, [&](auto& words, int f, int k) { left.load(words, f * kFragmentRows, k); }, right);
  }
#pragma unroll
  for (int f = 0; f < kFragments; ++f) {
#pragma unroll
    for (int i = 0; i < kHalfColumns / 2; ++i)
      product[(f * kFragmentRows + fragment_row(row_of_element(i))) * O::kColumns + half * kHalfColumns +
              fragment_column(i)] = sums[f][i];
  }
}

template <class O>
void check(Checks& checks) {
  for (const Probe& probe : operand_probes(kRows, O::kColumns, O::kDepth)) {
    checks.section(O::name(), probe.name);
    const DeviceTensor left((O::kLeftTransposed ? probe.left.transposed() : probe.left).tensor(),
                            O::kLeftLoaded ? kDType<typename O::E> : DType::kFloat32),
        right((O::kRightTransposed ? probe.right : probe.right.transposed()).tensor(), kDType<typename O::E>),
        product = no_product(kRows, O::kColumns);
    launch_kernel("probe_kernel", &probe_kernel<O>, 1, kThreads, sizeof(Memory<O>), nullptr,
                  strided_lines(left.view()).head(0, 0), strided_lines(right.view()).head(0, 0),
                  static_cast<float*>(product.view().data));
    check_product(checks, product, probe);
  }
}

// Checks sizes of columns and depth that fit into 99 KiB of shared memory, which a block can have on every GPU.
template <class E, Left kLeft, Right kRight>
void check_sizes(Checks& checks) {
  check<Operands<E, kLeft, kRight, 64, 64>>(checks);
  check<Operands<E, kLeft, kRight, 128, 64>>(checks);
  check<Operands<E, kLeft, kRight, 256, 64>>(checks);
  check<Operands<E, kLeft, kRight, 64, 128>>(checks);
  if constexpr (sizeof(E) == 2) check<Operands<E, kLeft, kRight, 64, 256>>(checks);
}

template <class E>
void check_element(Checks& checks) {
  check_sizes<E, Left::kLines, Right::kLines>(checks);  // scores, steps of contractions
  if constexpr (sizeof(E) == 2)
    check_sizes<E, Left::kLines, Right::kElements>(checks);         // the same with transposed columns
  check_sizes<E, Left::kElements, Right::kLines>(checks);           // the same with a transposed payload
  check_sizes<E, Left::kRegisters, Right::kElements>(checks);       // weights times payload
  check_sizes<E, Left::kRegisters, Right::kFragmentLines>(checks);  // weights times transposed payload
  check_sizes<E, Left::kStoredLines, Right::kElements>(checks);     // gradients of columns and payload
  check_sizes<E, Left::kStoredElements, Right::kElements>(checks);  // gradients of rows
}

}  // namespace monoidreduce::test

int main() {
  using namespace monoidreduce::test;
  Checks checks;
  try {
    check_element<__nv_bfloat16>(checks);
    check_element<__half>(checks);
    check_element<float>(checks);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return checks.finish();
}
