// The last round of equally long jobs, where fewer are left than blocks: their tiles are shared out evenly, and all blocks end
// together. A job of it is then in parts of several blocks, of which the last one, with the job's last tile, joins them
// (handover.cuh). A block leaves a part to be joined by another at most once: its second one, or its only one.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/kernel/parts.h"
#include "monoidreduce/math.h"

namespace monoidreduce {

struct LastRound {
  int jobs = 0;    // the last ones, at most one for a block; 0: all jobs are whole
  int tiles = 0;   // of each
  int blocks = 0;  // that share them; each has one or two parts

  struct Part {
    int job, first_tile, tiles;  // job: of those in parts
  };
  // The first part of a block, or the second; no tiles: there is none.
  MR_HD Part part(int block, int which) const {
    const int end = begin(block + 1);
    int at = begin(block);
    const int job = at / tiles + which;
    if (which == 1) at = job * tiles;
    const int end_of_job = (job + 1) * tiles;
    return {job, at - job * tiles, (end < end_of_job ? end : end_of_job) - at};
  }
  // The blocks that have a part of a job.
  MR_HD int first_block(int job) const { return block_of(job * tiles); }
  MR_HD int last_block(int job) const { return block_of((job + 1) * tiles - 1); }

 private:
  // All tiles, of one job after the other.
  MR_HD int begin(int block) const { return static_cast<int>(std::int64_t{jobs} * tiles * block / blocks); }
  MR_HD int block_of(int tile) const {
    return static_cast<int>(((std::int64_t{tile} + 1) * blocks - 1) / (std::int64_t{jobs} * tiles));
  }
};

// Which of `jobs` equally long ones blocks share in their last round, if that is sooner done. of_part: what a part costs besides
// its tiles, in tiles.
inline LastRound last_round(std::int64_t jobs, std::int64_t tiles, int blocks, int of_part) {
  const std::int64_t left = jobs % blocks, all = left * tiles;
  if (left == 0 || tiles < of_part || all >= std::int64_t{1} << 31) return {};
  const std::int64_t sharing = std::min<std::int64_t>(blocks, all / of_part);
  if (parts_of(all, sharing) + 2 * of_part >= tiles) return {};
  return {static_cast<int>(left), static_cast<int>(tiles), static_cast<int>(sharing)};
}

}  // namespace monoidreduce
