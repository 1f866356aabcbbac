// Lists the spans of packed sequences, on the CPU.
#include "monoidreduce/ops/sequences.h"

#include "engine.h"

namespace monoidreduce::cpu {
namespace {

void require_sound(const char* argument, const char* lines, const Sequences& sequences) {
  for (std::int64_t s = 0; s <= sequences.count; ++s) {
    require(sequences.sound(s), argument, ": expected ascending numbers from 0 to at most ", lines, "=",
            sequences.lines, ", got ", sequences.starts[s], " at place ", s);
  }
}

void list_spans(const TensorView& spans, const Sequences& own, const Sequences& other, std::int64_t left,
                std::int64_t right) {
  auto* const to = static_cast<Span*>(spans.data);
  for (std::int64_t line = 0; line < own.lines; ++line)
    to[line] = unmasked_span(own, other, line, left, right);
}

}  // namespace

template <>
void run_alike(const SequenceSpans& x) {
  const Sequences rows = sequences_of(x.row_starts, x.row_spans),
                  columns = sequences_of(x.column_starts, x.column_spans);
  require_sound("cu_seqlens_q", "T", rows);
  require_sound("cu_seqlens_k", "S", columns);
  list_spans(x.row_spans, rows, columns, x.left, x.right);
  list_spans(x.column_spans, columns, rows, x.right, x.left);
}

}  // namespace monoidreduce::cpu
