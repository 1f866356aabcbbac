#include "monoidreduce/path_counter.h"

#include <mutex>

namespace monoidreduce {
namespace {

std::mutex mutex;
std::map<std::string, std::int64_t> counts;

}  // namespace

void count_path(const char* op, const std::string& path) {
  const std::string key = std::string(op) + "/" + path;
  const std::lock_guard lock(mutex);
  ++counts[key];
}

std::map<std::string, std::int64_t> path_counts() {
  const std::lock_guard lock(mutex);
  return counts;
}

}  // namespace monoidreduce
