// The table of calls whose launches are recorded: every operator, as `_ops` calls it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "launches/fake_cudart.h"

namespace monoidreduce::launches {

struct Call {
  std::string name;
  std::string tier = "", reason = "";  // what the library says about the call
  std::string error = "";              // message of the exception that was thrown
  std::vector<Event> events = {};
};

inline constexpr std::uintptr_t kStream = 0x57;

// A device, and the value of MONOIDREDUCE_CUDA_TIER.
struct Machine {
  const char* name;
  int device;
  const char* tier;
};
inline constexpr Machine kMachines[] = {
    {"RTX 3060", 0, ""}, {"A100", 1, ""},           {"H100", 2, ""},
    {"RTX 5090", 3, ""}, {"H100, sm80", 2, "sm80"}, {"H100, simt", 2, "simt"},
};
// Runs every call on a machine.
std::vector<Call> calls_on(const Machine& machine);

}  // namespace monoidreduce::launches
