// The k largest values of each row (stat.largest(f, k)) and their columns, found while an epilogue takes tiles
// of scores.
//
// A warp has the scores of 16 rows. For each it keeps a list in global memory, which stays in the L2 cache: the
// best elements so far in order, then the fresh ones, which exceed the k-th best. Four lanes share a row, and each
// has a part of the list for its own fresh elements, so that adding one needs no word with the others. Most
// elements are not fresh, and cost a comparison. Where many are, the warp sorts them into the best, which raises
// what elements have to exceed. Of V columns about k log(V / k) get into the list.
//
// A program (program/statistics.h) that wants them has kMost = k, and most(element), the value; others have kMost = 0.
//
// At the end of its part of the columns, a warp merges its best into those of the row, under a lock. Elements
// have a total order, so the result does not depend on the order of merges.
#pragma once

#include "monoidreduce/device/contraction/most_memory.h"

namespace monoidreduce {

// Puts 64 elements in order: element n is elements[n / 32] of lane n % 32. kDown: from the largest on. kBitonic:
// they are bitonic already, as two ordered halves in opposite directions are.
template <bool kDown, bool kBitonic>
__device__ __forceinline__ void sort_elements(RankedElement (&elements)[2]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int size = kBitonic ? kMostKept : 2; size <= kMostKept; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
      if (distance == 32) {
        const RankedElement x = elements[0], y = elements[1];
        const bool exchanged = kDown ? x < y : y < x;
        elements[0] = exchanged ? y : x, elements[1] = exchanged ? x : y;
        continue;
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const RankedElement x = elements[n], y = __shfl_xor_sync(0xffffffffu, x, distance);
        const bool down = (((lane + 32 * n) & size) == 0) == kDown, first = (lane & distance) == 0;
        elements[n] = (down == first) == (x > y) ? x : y;
      }
    }
  }
}
// The largest 64 of two sets of 64, in order. others: in the opposite order.
__device__ __forceinline__ void merge_elements(RankedElement (&best)[2], const RankedElement (&others)[2]) {
#pragma unroll
  for (int n = 0; n < 2; ++n) best[n] = best[n] > others[n] ? best[n] : others[n];
  sort_elements<true, true>(best);
}

// Sorts the fresh elements of a list into its best, and returns the k-th. Called by a warp. Each of the row's four lanes has a part of
// the list. The calling thread reads from parts n = threadIdx.x % 32 / 16 and n + 2, which have fresh[0] and fresh[1] elements.
template <int k>
__device__ __forceinline__ RankedElement sort_list(RankedElement* list, int of_lane, const int (&fresh)[2]) {
  const int lane = threadIdx.x % 32;
  RankedElement best[2] = {list[lane], list[lane + 32]};
#pragma unroll 1
  for (int first = 0; __ballot_sync(0xffffffffu, first < fresh[0] || first < fresh[1]) != 0; first += 16) {
    RankedElement others[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int at = first + lane % 16;
      others[n] = at < fresh[n] ? list[kMostKept + (2 * n + lane / 16) * of_lane + at] : 0;
    }
    sort_elements<false, false>(others);
    merge_elements(best, others);
  }
  __syncwarp();
  list[lane] = best[0], list[lane + 32] = best[1];
  return __shfl_sync(0xffffffffu, best[(k - 1) / 32], (k - 1) % 32);
}

// How far the lists of a thread's two rows are. A thread has elements of two rows (fragment.cuh), which it shares
// with three neighbours.
template <int k>
struct MostOfRows {
  int row0;                 // of the fragment
  float least[2];           // the k-th value so far: what others have to exceed
  std::uint32_t column[2];  // the low half of that element
  int fresh[2];             // of this lane
  int looks, all_at;  // how often lists were looked at, and the look at which all of them are sorted next

  // The fresh elements that a list has room for, of each of its four lanes.
  __device__ __forceinline__ static int of_lane(const MostMemory& m) { return (m.pitch - kMostKept) / 4; }
  __device__ __forceinline__ RankedElement* list(const MostMemory& m, int row_of_warp) const {
    const int cluster = blockIdx.x / m.blocks, share = threadIdx.x / 128 % m.shares;
    const std::int64_t row =
        (std::int64_t{cluster} * m.shares + share) * m.row_block + row0 % m.row_block + warp_row(row_of_warp);
    return m.lists + row * m.pitch;
  }
  // The row in the fragment.
  __device__ __forceinline__ static int warp_row(int row_of_warp) {
    return threadIdx.x / 32 % 4 * 16 + row_of_warp;
  }

  __device__ __forceinline__ void begin(const MostMemory& m, int first_row) {
    row0 = first_row, looks = 0, all_at = 1;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      // Nothing exceeds infinity, so a row that does not exist costs nothing.
      least[r] = row0 + warp_row(threadIdx.x % 32 / 4 + 8 * r) < m.rows ? -INFINITY : INFINITY;
      column[r] = 0, fresh[r] = 0;
    }
    __syncwarp();
#pragma unroll 1
    for (int row = 0; row < 16; ++row) {
      RankedElement* const to = list(m, row);
      to[threadIdx.x % 32] = to[threadIdx.x % 32 + 32] = 0;
    }
    __syncwarp();
  }
  // Elements x of a thread: row_of(i) is the thread's row of element i, column_of(i) its column, and present(i) whether it is
  // there.
  template <int kCount>
  __device__ __forceinline__ void offer(const MostMemory& m, const float (&x)[kCount], const auto& row_of,
                                        const auto& column_of, const auto& present) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int r = row_of(i);
      if (!present(i) || x[i] < least[r]) continue;
      const RankedElement element = ranked(x[i], column_of(i));
      if (element <= (RankedElement{rank_of_value(least[r])} << 32 | column[r])) continue;
      RankedElement* const own =
          list(m, threadIdx.x % 32 / 4 + 8 * r) + kMostKept + threadIdx.x % 4 * of_lane(m);
      own[fresh[r]++] = element;
    }
  }
  // Sorts the lists that may not have room for the next kMostColumns columns. Called by all threads of a warp.
  //
  // Consumers share the operands' ring, so a cluster's products wait for each warp that sorts. So all sort all lists at the same
  // looks: where half as many columns have come again, as then few lists are full before.
  __device__ __forceinline__ void settle(const MostMemory& m) {
    const bool all = ++looks == all_at;
    sort_lists(m, all ? 0 : m.slack / 4);
    if (all) all_at += (looks + 1) / 2;
  }
  // Merges the lists into the rows' best.
  __device__ __forceinline__ void end(const MostMemory& m) {
    sort_lists(m, 0);
    const int lane = threadIdx.x % 32;
    const std::int64_t first = row0 + warp_row(0);
    if (first >= m.rows) return;
    unsigned* const lock = m.locks + first / kRowsOfLock;
    if (lane == 0) {
      while (atomicCAS(lock, 0u, 1u) != 0u) {
      }
    }
    __syncwarp();
    __threadfence();
#pragma unroll 1
    for (int row = 0; row < 16 && first + row < m.rows; ++row) {
      const RankedElement* const own = list(m, row);
      RankedElement* const whole = m.best + (first + row) * kMostKept;
      RankedElement best[2] = {own[lane], own[lane + 32]};
      const RankedElement others[2] = {__ldcg(whole + 63 - lane), __ldcg(whole + 31 - lane)};
      merge_elements(best, others);
      __syncwarp();
      __stcg(whole + lane, best[0]), __stcg(whole + lane + 32, best[1]);
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicExch(lock, 0u);
  }

 private:
  // Sorts the list of each row in which one of the four lanes has more fresh elements than `more_than`.
  __device__ __forceinline__ void sort_lists(const MostMemory& m, int more_than) {
#pragma unroll 1  // for the size of the code
    for (int r = 0; r < 2; ++r) {
      const int own = r == 0 ? fresh[0] : fresh[1];
      unsigned wanted = __ballot_sync(0xffffffffu, own > more_than);
      wanted |= wanted >> 1, wanted |= wanted >> 2, wanted &= 0x11111111u;  // a bit for each row
#pragma unroll 1
      for (; wanted != 0; wanted &= wanted - 1) {
        const int lane = __ffs(static_cast<int>(wanted)) - 1;  // the first of the row's four
        const int half = threadIdx.x % 32 / 16;
        const int of_lanes[2] = {__shfl_sync(0xffffffffu, own, lane + half),
                                 __shfl_sync(0xffffffffu, own, lane + 2 + half)};
        __syncwarp();  // the lanes' elements are in the list
        const RankedElement found = sort_list<k>(list(m, lane / 4 + 8 * r), of_lane(m), of_lanes);
        if (static_cast<int>(threadIdx.x & 28) != lane) continue;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          if (row != r) continue;
          fresh[row] = 0;
          if (found != 0) least[row] = value_of(found), column[row] = static_cast<std::uint32_t>(found);
        }
      }
    }
  }
};
// For a program without k largest values: nothing is kept.
template <>
struct MostOfRows<0> {
  __device__ __forceinline__ void begin(const MostMemory&, int) {}
  __device__ __forceinline__ void settle(const MostMemory&) {}
  __device__ __forceinline__ void end(const MostMemory&) {}
};

}  // namespace monoidreduce
