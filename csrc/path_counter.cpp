#include "monoidreduce/path_counter.h"

#include <mutex>
#include <tuple>

namespace monoidreduce {
namespace {

std::mutex mutex;
std::map<std::tuple<const char*, const char*, const char*, bool, const char*>, std::int64_t> counts;

}  // namespace

void count_path(const char* op, const char* engine, const char* variant, bool deterministic,
                const char* dtype) {
  const std::lock_guard lock(mutex);
  ++counts[{op, engine, variant, deterministic, dtype}];
}

std::map<std::string, std::int64_t> path_counts() {
  const std::lock_guard lock(mutex);
  std::map<std::string, std::int64_t> named;
  for (const auto& [path, count] : counts) {
    const auto& [op, engine, variant, deterministic, dtype] = path;
    const std::string slash = "/";
    named[op + slash + engine + slash + variant + (deterministic ? "/deterministic/" : slash) + dtype] +=
        count;
  }
  return named;
}

}  // namespace monoidreduce
