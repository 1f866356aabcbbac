// Counts how often each kernel path ran in this process, so that tests can check the dispatch.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace monoidreduce {

// Counts "op/path", as in "attention_forward/cpu/avx512/float32". Thread-safe.
void count_path(const char* op, const std::string& path);

std::map<std::string, std::int64_t> path_counts();

}  // namespace monoidreduce
