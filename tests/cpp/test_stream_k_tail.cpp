// Tests the split of the last jobs (stream-K tail, stream_k_tail.h). Every tile is in exactly one part, and parts are as even as
// possible. A block leaves at most one part for another block to join. Jobs are not split where that would take longer.
#include "monoidreduce/device/schedule/stream_k_tail.h"

#include <algorithm>
#include <vector>

#include "check.h"

namespace monoidreduce::test {
namespace {

constexpr int kBlocks = 132;

void check_parts(const StreamKTail& last, Checks& checks) {
  std::vector<int> found(static_cast<std::size_t>(last.jobs) * last.tiles);  // in how many parts a tile is
  std::vector<int> left(last.blocks);  // how many parts a block leaves for others to join
  int least = last.tiles, most = 0;
  for (int block = 0; block < last.blocks; ++block) {
    int share = 0;
    for (int which = 0; which < 2; ++which) {
      const StreamKTail::Part part = last.part(block, which);
      if (which == 1 && part.tiles <= 0) continue;
      share += part.tiles;
      checks.section("last round", "parts are of jobs, and have tiles");
      const bool there = part.job >= 0 && part.job < last.jobs && part.first_tile >= 0 && part.tiles > 0 &&
                         part.first_tile + part.tiles <= last.tiles;
      CHECK(checks, there, last.jobs, last.tiles, block, which);
      if (!there) return;
      checks.section("last round", "blocks of a job, the last of which has its last tile");
      CHECK(checks, block >= last.first_block(part.job) && block <= last.last_block(part.job), last.jobs,
            last.tiles, block, which);
      const bool ends = part.first_tile + part.tiles == last.tiles;
      CHECK(checks, ends == (block == last.last_block(part.job)), last.jobs, last.tiles, block, which);
      checks.section("last round", "a block leaves one part, and a second one, which comes first, is left");
      left[block] += !ends;
      CHECK(checks, left[block] <= 1 && (which == 0 || !ends), last.jobs, last.tiles, block, which);
      for (int tile = 0; tile < part.tiles; ++tile)
        ++found[std::size_t(part.job) * last.tiles + part.first_tile + tile];
    }
    least = std::min(least, share), most = std::max(most, share);
  }
  checks.section("last round", "every tile once");
  CHECK(checks, std::all_of(found.begin(), found.end(), [](int n) { return n == 1; }), last.jobs, last.tiles);
  checks.section("last round", "shares are even");
  CHECK(checks, most - least <= 1, last.jobs, last.tiles, least, most);
  checks.section("last round", "what is joined has been left");
  for (int job = 0; job < last.jobs; ++job) {
    for (int block = last.first_block(job); block < last.last_block(job); ++block)
      CHECK(checks, left[block] == 1, last.jobs, last.tiles, job, block);
  }
}

void check_choice(Checks& checks) {
  constexpr int kOfPart = 2;
  int in_parts = 0;
  for (std::int64_t jobs = 1; jobs < 3000; jobs = jobs * 9 / 8 + 1) {
    for (std::int64_t tiles = 0; tiles < 100000; tiles = tiles * 3 / 2 + 1) {
      const StreamKTail last = stream_k_tail(jobs, tiles, kBlocks, kOfPart);
      if (last.jobs == 0) continue;
      ++in_parts;
      checks.section("choice", "those of the last round, sooner done");
      CHECK(checks, last.jobs == jobs % kBlocks && last.tiles == tiles && last.blocks <= kBlocks, jobs,
            tiles);
      const std::int64_t share = (last.jobs * tiles + last.blocks - 1) / last.blocks;
      CHECK(checks, share >= kOfPart && share + 2 * kOfPart < tiles, jobs, tiles, share);
      check_parts(last, checks);
    }
  }
  checks.section("choice", "some are");
  CHECK(checks, in_parts > 100, in_parts);
  CHECK(checks, stream_k_tail(2048, 32, kBlocks, kOfPart).jobs == 68);
  CHECK(checks, stream_k_tail(kBlocks + 1, 20, kBlocks, kOfPart).blocks == 10);
  checks.section("choice", "none of a full round, nor of short jobs, nor of one beyond 32 bits");
  CHECK(checks, stream_k_tail(4 * kBlocks, 1000, kBlocks, kOfPart).jobs == 0);
  CHECK(checks, stream_k_tail(kBlocks + 1, 6, kBlocks, kOfPart).jobs == 0);
  CHECK(checks, stream_k_tail(kBlocks - 1, 50, kBlocks, kOfPart).jobs == 0);
  CHECK(checks, stream_k_tail(100, std::int64_t{1} << 25, kBlocks, kOfPart).jobs == 0);
}

}  // namespace
}  // namespace monoidreduce::test

int main() {
  monoidreduce::test::Checks checks;
  monoidreduce::test::check_choice(checks);
  return checks.finish();
}
