// A fake CUDA runtime, for machines without a GPU. Nothing runs: launches of kernels and memsets are only recorded. Device
// memory consists of addresses that nobody reads.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace monoidreduce::launches {

// The facts that the host code asks about a GPU. shared_bytes: the most shared memory that a block may have.
struct Device {
  int major, minor, multiprocessors, cache_bytes, shared_bytes;
};
// cuda:0, cuda:1, ...
inline constexpr Device kDevices[] = {
    {8, 6, 28, 3 << 20, 99 << 10},     // RTX 3060
    {8, 0, 108, 40 << 20, 163 << 10},  // A100
    {9, 0, 132, 50 << 20, 227 << 10},  // H100
    {12, 0, 170, 96 << 20, 99 << 10},  // RTX 5090
};
inline constexpr int kDeviceCount = std::size(kDevices);

// The launch of a kernel, or a cudaMemsetAsync with its pointer, value and size as parameters. A parameter is text: its 8-byte
// words, where an address is printed as a name and an offset.
struct Event {
  std::string name;  // demangled
  int device;
  std::array<unsigned, 3> grid, block;
  std::size_t shared_bytes;
  const void* stream;
  std::vector<std::string> parameters;
};
// Returns what was launched since the last call.
std::vector<Event> take_events();

// Allocates fake memory under a name, at the same address in every run.
void* allocate(const std::string& name, std::size_t bytes);
void free_all();

}  // namespace monoidreduce::launches
