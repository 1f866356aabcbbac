#include "jobs.h"

#include <algorithm>

#include "monoidreduce/device/schedule/parts.h"

namespace monoidreduce {
namespace {

// The columns that any of the rows [first, last] keeps.
TileRange columns_of(const BandedFold& fold, std::int64_t first, std::int64_t last) {
  const std::int64_t shift = fold.columns - fold.rows;
  return {fold.left < 0 ? 0 : std::max<std::int64_t>(first + shift - fold.left, 0),
          fold.right < 0 ? fold.columns : std::min(last + shift + fold.right + 1, fold.columns)};
}
// The rows that keep any of the columns [first, last].
TileRange rows_of(const BandedFold& fold, std::int64_t first, std::int64_t last) {
  const std::int64_t shift = fold.columns - fold.rows;
  return {fold.right < 0 ? 0 : std::max<std::int64_t>(first - shift - fold.right, 0),
          fold.left < 0 ? fold.rows : std::min(last - shift + fold.left + 1, fold.rows)};
}

}  // namespace

std::vector<TileRange> streamed_tiles(const BandedFold& fold, bool rows_stay, std::int64_t staying,
                                      std::int64_t streamed) {
  const std::int64_t lines = rows_stay ? fold.rows : fold.columns;
  std::vector<TileRange> tiles;
  for (std::int64_t first = 0; first < lines; first += staying) {
    const std::int64_t last = std::min(first + staying, lines) - 1;
    const TileRange kept = rows_stay ? columns_of(fold, first, last) : rows_of(fold, first, last);
    if (kept.end > kept.begin)
      tiles.push_back({kept.begin / streamed, parts_of(kept.end, streamed)});
    else
      tiles.push_back({0, 0});
  }
  return tiles;
}

std::vector<std::pair<std::int64_t, std::int64_t>> job_order(const BandedFold& fold, bool rows_stay,
                                                             std::int64_t tiles, std::int64_t heads,
                                                             std::int64_t section) {
  // If a row's last column is bounded (causal), the last rows keep the most columns, and the first columns the most rows.
  const bool last_first = rows_stay && fold.right >= 0;
  std::vector<std::pair<std::int64_t, std::int64_t>> order;
  for (std::int64_t first = 0; first < heads; first += section)
    for (std::int64_t rank = 0; rank < tiles; ++rank)
      for (std::int64_t head = first; head < std::min(first + section, heads); ++head)
        order.emplace_back(last_first ? tiles - 1 - rank : rank, head);
  return order;
}

std::vector<std::int64_t> split_tiles(std::int64_t tiles, std::int64_t splits) {
  const std::int64_t share = parts_of(tiles, splits);
  std::vector<std::int64_t> counts;
  for (std::int64_t split = 0; split < splits; ++split)
    counts.push_back(std::clamp<std::int64_t>(tiles - split * share, 0, share));
  return counts;
}

}  // namespace monoidreduce
