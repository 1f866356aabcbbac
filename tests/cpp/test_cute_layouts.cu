// Compares the layouts of tiles in shared memory and the descriptors of wgmma operands with CuTe's. Runs on the host.
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

#include "check.h"
#include "monoidreduce/device/block/shared_tile.cuh"

namespace monoidreduce {
namespace {

using Element = cute::half_t;
using Atom = cute::SM90::GMMA::Layout_K_SW128_Atom<Element>;

// Slabs, one behind the other, with lines of 64 elements: in CuTe's terms atoms of 8 lines, repeated along the lines first.
template <int kLines, int kWidth>
auto tile_layout() {
  return cute::tile_to_shape(Atom{}, cute::Shape<cute::Int<kLines>, cute::Int<kWidth>>{});
}

template <int kLines, int kWidth>
void check_places(test::Checks& checks) {
  const auto layout = cute::as_position_independent_swizzle_layout(tile_layout<kLines, kWidth>());
  for (int line = 0; line < kLines; ++line) {
    for (int k = 0; k < kWidth; ++k) {
      const int place =
          k / kSlab * SharedTile<kLines, kSlab>::kBytes + place_of(line, k % kSlab / 8) + k % 8 * 2;
      CHECK(checks, place == layout(line, k) * 2, kLines, kWidth, line, k);
    }
  }
}

// CuTe's descriptor of `operand`, which starts `start` elements into a tile at address 0. On a host CuTe cannot get an
// address in shared memory: it prints a message and uses 0.
template <cute::SM90::GMMA::Major kMajor, class Operand>
std::uint64_t expected(const Operand& operand, int start) {
  return cute::SM90::GMMA::make_gmma_desc<kMajor>(operand).desc_ + start * 2 / 16;
}

// Steps along the width, for an operand that has kLines lines of a tile.
template <int kLines, int kWidth>
void check_along_width(test::Checks& checks) {
  auto tile =
      cute::make_tensor(cute::make_smem_ptr(static_cast<Element*>(nullptr)), tile_layout<kLines, kWidth>());
  const auto steps = cute::flat_divide(tile, cute::Shape<cute::Int<kLines>, cute::Int<kProductDepth>>{});
  const auto plain = cute::get_nonswizzle_portion(tile.layout());
  const AlongWidth<kLines> own(0);
  for (int k = 0; k < kWidth / kProductDepth; ++k) {
    const auto operand = steps(cute::_, cute::_, 0, 0);
    const std::uint64_t cutes = expected<cute::SM90::GMMA::Major::K>(operand, plain(0, k * kProductDepth));
    CHECK(checks, own[k] == cutes, kLines, kWidth, k, own[k], cutes);
  }
}

// Steps along the lines: the rows of the operand are elements of the width, which are adjacent in memory.
template <int kLines, int kWidth>
void check_along_rows(test::Checks& checks) {
  const auto tile_of = [](auto shape) {
    return cute::tile_to_shape(cute::SM90::GMMA::Layout_MN_SW128_Atom<Element>{}, shape,
                               cute::Step<cute::_2, cute::_1>{});
  };
  const auto layout = tile_of(cute::Shape<cute::Int<kWidth>, cute::Int<kLines>>{});
  auto tile = cute::make_tensor(cute::make_smem_ptr(static_cast<Element*>(nullptr)), layout);
  const auto steps = cute::flat_divide(tile, cute::Shape<cute::Int<kWidth>, cute::Int<kProductDepth>>{});
  const auto plain = cute::get_nonswizzle_portion(tile.layout());
  const AlongRows<kLines> own(0);
  // If there is a single slab, the distance to the next slab is not read, so it is not compared.
  constexpr std::uint64_t kRead = kWidth == kSlab ? ~(std::uint64_t{0x3fff} << 16) : ~std::uint64_t{0};
  for (int k = 0; k < kLines / kProductDepth; ++k) {
    const auto operand = steps(cute::_, cute::_, 0, 0);
    const std::uint64_t cutes = expected<cute::SM90::GMMA::Major::MN>(operand, plain(0, k * kProductDepth));
    CHECK(checks, (own[k] & kRead) == (cutes & kRead), kLines, kWidth, k, own[k], cutes);
  }
}

template <int kLines, int kWidth>
void check_tile(test::Checks& checks) {
  check_places<kLines, kWidth>(checks);
  check_along_width<kLines, kWidth>(checks);
  check_along_rows<kLines, kWidth>(checks);
}

}  // namespace
}  // namespace monoidreduce

int main() {
  monoidreduce::test::Checks checks;
  monoidreduce::check_tile<64, 64>(checks);
  monoidreduce::check_tile<80, 128>(checks);
  monoidreduce::check_tile<128, 64>(checks);
  monoidreduce::check_tile<128, 256>(checks);
  monoidreduce::check_tile<192, 128>(checks);
  monoidreduce::check_tile<256, 64>(checks);
  return checks.finish();
}
