// Prints as JSON, for every call of the table on every device, what was launched and with which parameters.
// scripts/launch_trace.py runs it.
#include <cstdint>
#include <cstdio>
#include <string>

#include "launches/calls.h"

namespace {

using namespace monoidreduce::launches;

std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + '"';
}

void print(const Event& event) {
  const auto& [x, y, z] = event.grid;
  std::printf("{\"kernel\": %s, \"device\": %d, \"grid\": [%u, %u, %u], \"block\": [%u, %u, %u], ",
              quoted(event.name).c_str(), event.device, x, y, z, event.block[0], event.block[1],
              event.block[2]);
  std::printf("\"shared\": %zu, \"stream\": %zu, \"parameters\": [", event.shared_bytes,
              reinterpret_cast<std::uintptr_t>(event.stream));
  const char* separator = "";
  for (const auto& parameter : event.parameters)
    std::printf("%s%s", separator, quoted(parameter).c_str()), separator = ", ";
  std::printf("]}");
}

}  // namespace

int main() {
  const char* separator = "[\n";
  for (const Machine& machine : kMachines) {
    for (const Call& call : calls_on(machine)) {
      std::printf(
          "%s{\"machine\": %s, \"call\": %s, \"tier\": %s, \"reason\": %s, \"error\": %s, \"launches\": [",
          separator, quoted(machine.name).c_str(), quoted(call.name).c_str(), quoted(call.tier).c_str(),
          quoted(call.reason).c_str(), quoted(call.error).c_str());
      separator = ",\n";
      const char* comma = "";
      for (const Event& event : call.events) std::printf("%s", comma), print(event), comma = ", ";
      std::printf("]}");
    }
  }
  std::printf("\n]\n");
}
