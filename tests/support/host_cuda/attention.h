// A call of attention whose scores functions modify, as the host code of csrc/cuda/modified_attention.cu launches it. Behind
// the program P, its monoid Fold and its Rows.
using namespace monoidreduce;
using namespace monoidreduce::simt;

struct Call {  // dense tensors of float64
  char *q, *k, *v, *out, *grad_out, *grad_lse, *d_q, *d_k, *d_v;
  double *lse, *lse_low, *of_lse, *centre, *sinks;
  const Span *row_spans, *column_spans;
  std::int64_t batch, heads, key_heads, queries, keys, width, value_width, left, right, deterministic;
  double scale;
  ModifiedScoresData scores;

  Tensor of(char* data, std::int64_t heads, std::int64_t lines, std::int64_t width) const {
    return {data,
            {batch, heads, lines, width},
            {heads * lines * width * 8, lines * width * 8, width * 8, 8},
            DType::kFloat64};
  }
  Tensor of_queries(char* data, std::int64_t width) const { return of(data, heads, queries, width); }
  Tensor of_keys(char* data, std::int64_t width) const { return of(data, key_heads, keys, width); }
  ColumnRange range() const {
    if (row_spans) return {.listed = true, .of_rows = row_spans, .of_columns = column_spans};
    return ColumnRange{left, right, keys - queries}.bounding(queries, keys);
  }
  ProgramScores<P> program() const { return {{scores, scale}}; }
  Rows rows() const { return {lse, lse_low, centre, of_lse, sinks}; }
};

extern "C" void fold(const Call& x) {
  const ForwardArguments arguments{.rows = {x.of_queries(x.q, x.width)},
                                   .columns = {x.of_keys(x.k, x.width)},
                                   .payload = x.of_keys(x.v, x.value_width),
                                   .out = x.of_queries(x.out, x.value_width),
                                   .range = x.range()};
  const auto jobs = x.batch * x.heads * divide_up(x.queries, kTile) * divide_up(x.value_width, kSlice);
  host::launch(static_cast<unsigned>(jobs),
               [&] { fold_forward<true>(Fold{}, arguments, x.program(), x.rows()); });
}

extern "C" void pull(const Call& x) {
  host::launch(3, [&] {
    row_centre(x.of_queries(x.grad_out, x.value_width), x.of_queries(x.out, x.value_width), Tensor(),
               x.of(x.grad_lse, x.heads, x.queries, 1), x.of_lse, x.centre);
  });
  const auto walk = [&](bool of_rows, bool of_columns, Walk walk) {
    const auto wanted = [](bool is, const Tensor& t) { return is ? t : Tensor(); };
    const PullArguments arguments{
        .pair = {{x.of_queries(x.q, x.width), x.of_keys(x.k, x.width),
                  wanted(of_rows, x.of_queries(x.d_q, x.width)),
                  wanted(of_columns, x.of_keys(x.d_k, x.width))},
                 {x.of_queries(x.grad_out, x.value_width), x.of_keys(x.v, x.value_width), Tensor(),
                  wanted(of_columns, x.of_keys(x.d_v, x.value_width))}},
        .pairs = 2,
        .range = x.range(),
        .whole = true};
    host::launch(static_cast<unsigned>(walk.count(false)),
                 [&] { fold_backward<true>(Fold{}, arguments, x.program(), x.rows(), walk); });
  };
  const std::int64_t group = x.heads / x.key_heads, down = divide_up(x.queries, kTile),
                     across = divide_up(x.keys, kTile);
  const auto walked = [&](bool members, bool rows, bool columns, bool exclusive) {
    return Walk{
        {x.batch, x.key_heads, group, down, across}, {false, false, members, rows, columns}, exclusive};
  };
  if (!x.deterministic) return walk(true, true, walked(false, false, false, false));
  walk(true, false, walked(false, false, true, true));
  walk(false, true, walked(true, true, false, true));
}
