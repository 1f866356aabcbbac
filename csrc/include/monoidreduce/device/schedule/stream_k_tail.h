// The last, partial wave of equally long jobs: the stream-K tail. If fewer jobs than blocks are left, their
// tiles are shared out evenly, so that all blocks end together. Several blocks then have parts of one job.
// The block with the job's last tile joins the parts (stream_k_fixup.cuh). A block stores at most one part for
// another block: its second part, or its only one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/device/schedule/parts.h"
#include "monoidreduce/math.h"

namespace monoidreduce {

struct StreamKTail {
  int jobs = 0;    // split jobs, which are the last ones; at most one per block; 0: no job is split
  int tiles = 0;   // tiles of each job
  int blocks = 0;  // blocks that share the split jobs; each has one or two parts

  struct Part {
    int job, first_tile, tiles;  // job: the index among the split jobs
  };
  // The first (which = 0) or second (which = 1) part of a block; a part without tiles if there is none.
  MR_HD Part part(int block, int which) const {
    const int end = begin(block + 1);
    int at = begin(block);
    const int job = at / tiles + which;
    if (which == 1) at = job * tiles;
    const int end_of_job = (job + 1) * tiles;
    return {job, at - job * tiles, (end < end_of_job ? end : end_of_job) - at};
  }
  // The first and the last block with a part of a job.
  MR_HD int first_block(int job) const { return block_of(job * tiles); }
  MR_HD int last_block(int job) const { return block_of((job + 1) * tiles - 1); }

 private:
  // Tiles are numbered across all split jobs, one job after the other.
  MR_HD int begin(int block) const { return static_cast<int>(std::int64_t{jobs} * tiles * block / blocks); }
  MR_HD int block_of(int tile) const {
    return static_cast<int>(((std::int64_t{tile} + 1) * blocks - 1) / (std::int64_t{jobs} * tiles));
  }
};

// How blocks share the last wave of `jobs` equally long jobs, if sharing makes it shorter. of_part: the fixed
// cost of a part, in tiles.
inline StreamKTail stream_k_tail(std::int64_t jobs, std::int64_t tiles, int blocks, int of_part) {
  const std::int64_t left = jobs % blocks, all = left * tiles;
  if (left == 0 || tiles < of_part || all >= std::int64_t{1} << 31) return {};
  const std::int64_t sharing = std::min<std::int64_t>(blocks, all / of_part);
  if (parts_of(all, sharing) + 2 * of_part >= tiles) return {};
  return {static_cast<int>(left), static_cast<int>(tiles), static_cast<int>(sharing)};
}

}  // namespace monoidreduce
