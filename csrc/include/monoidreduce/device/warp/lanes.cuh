// Shuffles and reductions between lanes that share a row. They move any monoid's state or frame word by word.
#pragma once

#include <cstring>
#include <type_traits>

#include "monoidreduce/monoid.h"

namespace monoidreduce {

// The state that the lane `lane ^ lane_mask` holds.
template <class State>
__device__ __forceinline__ State shuffle_xor(const State& state, int lane_mask) {
  static_assert(std::is_trivially_copyable_v<State>);
  if constexpr (std::is_empty_v<State>) {
    return state;
  } else {
    static_assert(sizeof(State) % sizeof(unsigned) == 0, "a state is made of 4-byte or 8-byte words");
    unsigned words[sizeof(State) / sizeof(unsigned)];
    std::memcpy(words, &state, sizeof(State));
#pragma unroll
    for (unsigned& word : words) word = __shfl_xor_sync(0xffffffffu, word, lane_mask);
    State other = state;
    std::memcpy(&other, words, sizeof(State));
    return other;
  }
}

// Reduces the values of kLanes neighbouring lanes by op; each of these lanes gets the result. All lanes of
// the warp must call it.
template <int kLanes, class T, class Op>
__device__ __forceinline__ T reduce_lanes(T value, Op op) {
#pragma unroll
  for (int lane_mask = kLanes / 2; lane_mask > 0; lane_mask /= 2)
    value = op(value, shuffle_xor(value, lane_mask));
  return value;
}

// Transposes 4 x 4 words over four neighbouring lanes: lane n receives the lanes' words[n], in the order of
// the lanes.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      unsigned &low = words[distance == 1 ? 2 * i : i], &high = words[(distance == 1 ? 2 * i : i) + distance];
      const unsigned other = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      if (upper) {
        low = other;
      } else {
        high = other;
      }
    }
  }
}

}  // namespace monoidreduce
