// Counts how often each kernel path ran in this process, so that tests can check the dispatch.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace monoidreduce {

// Counts "op/engine/variant/dtype", for example "attention_forward/cpu/avx512/float32". A deterministic call has
// "/deterministic" before the dtype. The arguments must be string literals: their pointers are the key, so that counting
// formats no text. Thread-safe.
void count_path(const char* op, const char* engine, const char* variant, bool deterministic,
                const char* dtype);

std::map<std::string, std::int64_t> path_counts();

}  // namespace monoidreduce
