// Packed sequences (varlen): the spans of their rows and columns, for kernels that read column ranges from memory
// (ColumnRange).
#pragma once

#include "monoidreduce/describe.h"
#include "monoidreduce/error.h"
#include "monoidreduce/score.h"

namespace monoidreduce {

// Sequences in one tensor, one behind another. Lines [starts[s], starts[s + 1]) are sequence s. Lines from starts[count] on
// belong to no sequence.
struct Sequences {
  const std::int64_t* starts;  // [count + 1]
  std::int64_t count, lines;

  // The sequence that a line belongs to: the last one that starts at or before it, which is not empty.
  MR_HD std::int64_t of(std::int64_t line) const {
    std::int64_t low = 0, high = count;  // starts[low] <= line < starts[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (starts[middle] <= line ? low : high) = middle;
    }
    return low;
  }
  // Whether starts[s] is valid: the first one is 0, they ascend, and the last one is at most the number of lines.
  MR_HD bool sound(std::int64_t s) const {
    const std::int64_t before = s == 0 ? 0 : starts[s - 1];
    return before <= starts[s] && (s != 0 || starts[0] == 0) && (s != count || starts[s] <= lines);
  }
};

// The unmasked lines of the other side (keys for a query, queries for a key): those of the same sequence in a band around the
// line that this one is aligned with. The last lines of a sequence on both sides are aligned.
MR_HD Span unmasked_span(const Sequences& own, const Sequences& other, std::int64_t line, std::int64_t left,
                         std::int64_t right) {
  if (line >= own.starts[own.count]) return {other.starts[other.count], other.starts[other.count]};
  const std::int64_t s = own.of(line), first = other.starts[s], lines = other.starts[s + 1] - first,
                     shift = lines - (own.starts[s + 1] - own.starts[s]);
  const ColumnRange band{left, right, shift};
  const std::int64_t within = line - own.starts[s], end = band.end(within, lines), begin = band.begin(within);
  return {first + (begin < end ? begin : end), first + end};
}

// Marks cu_seqlens that turned out to be invalid on a GPU: everything is masked, and undefine() makes the results NaN.
inline constexpr Span kUndefined{1, 0};

struct SequenceSpans {
  TensorView row_spans, column_spans;    // Span
  TensorView row_starts, column_starts;  // cu_seqlens: where each sequence starts, and the end of the last
  std::int64_t left = ColumnRange::kUnbounded,
               right = ColumnRange::kUnbounded;  // the window, see ColumnRange
};
inline void check_starts(const SequenceSpans& x) {
  require(x.row_starts.size[0] > 0, "cu_seqlens_q: expected at least one number, got none");
}
template <std::same_as<SequenceSpans> X>
constexpr auto describe(const X*) {
  constexpr auto is_bound = [](std::int64_t n) { return n >= ColumnRange::kUnbounded; };
  constexpr const char* kBound = "an integer >= 0, or -1 for no bound";
  return helper(
      "sequence_spans", kAnyCpu | kGpus, result("row_spans", &X::row_spans, "M span=2", Type::kInt64),
      result("column_spans", &X::column_spans, "N span=2", Type::kInt64),
      tensor("cu_seqlens_q", &X::row_starts, "sequences+1", Type::kInt64).dense().where(&check_starts),
      tensor("cu_seqlens_k", &X::column_starts, "sequences+1", Type::kInt64).dense(),
      option("left", &X::left, kBound, is_bound), option("right", &X::right, kBound, is_bound));
}
inline Sequences sequences_of(const TensorView& starts, const TensorView& spans) {
  return {static_cast<const std::int64_t*>(starts.data), starts.size[0] - 1, spans.size[0]};
}

// Sets all elements of a result to NaN if the spans are kUndefined. On CUDA.
struct Undefined {
  TensorView result, row_spans;
};
template <std::same_as<Undefined> X>
constexpr auto describe(const X*) {
  return helper("undefine", kGpus, result("result", &X::result, "elements"),
                tensor("row_spans", &X::row_spans, "M span=2", Type::kInt64).dense());
}

}  // namespace monoidreduce
