// How much of the L2 cache the heads of a section may take (device/schedule/schedule.cuh: heads whose jobs take turns).
#pragma once

#include <cstdint>

namespace monoidreduce {

inline constexpr std::int64_t kSectionBytes = 32 << 20;

}  // namespace monoidreduce
