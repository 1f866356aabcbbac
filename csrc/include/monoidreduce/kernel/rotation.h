// The order in which jobs visit tiles that all of them add to, in deterministic mode: each sum has a fixed order of jobs.
//
// If all jobs visited the tiles in the same order, each would wait for its predecessor at the first tile, one after
// another. So each job begins some tiles after its predecessor, goes down to tile 0, and then wraps around to the last
// tile. At every tile its predecessor has been there before.
//
// Before it wraps around a job adds to one sum, afterwards to another. So a job waits only for jobs before it. With a single
// sum, the first job would wait for the last one after wrapping around.
//
// If there are too few tiles to keep the jobs apart, jobs are divided into groups, each with its own sums.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/kernel/parts.h"
#include "monoidreduce/math.h"

namespace monoidreduce {

struct Rotation {
  int tiles;
  int groups = 1;      // job j belongs to group j % groups
  int period = 1;      // the number of jobs of a group that begin at different tiles; then these tiles repeat
  int spread = tiles;  // the number of tiles among which their beginnings are spread

  // With a period of one, every job begins at the last tile and never wraps around.
  MR_HD int sums_of_group() const { return period == 1 ? 1 : 2; }
  MR_HD int sums() const { return groups * sums_of_group(); }

  struct Member {
    int group, round, rank;  // round: the index of the period; rank: the index within it
  };
  MR_HD Member member(int job) const {
    const int of_group = job / groups;
    return {job % groups, of_group / period, of_group % period};
  }
  MR_HD int first(const Member& job) const { return (job.rank + 1) * spread / period - 1; }

  // The sum that a job adds to at a tile, and the number of jobs that add to it before.
  struct Turn {
    int sum, before;
  };
  MR_HD Turn turn(const Member& job, int tile) const {
    // The number of jobs of a period that begin below the tile, so that they reach it after wrapping around.
    const int reached = ((tile + 1) * period - 1) / spread, below = reached < period ? reached : period;
    const bool round_end = job.rank < below;
    return {sums_of_group() * job.group + (round_end ? 1 : 0),
            round_end ? job.round * below + job.rank : job.round * (period - below) + job.rank - below};
  }
};

// The distance between consecutive jobs, in parts of a tile. The lower bound makes sure that a job's additions are complete
// when the next job comes; the upper bound, that the tiles read at the same time fit into the L2 cache.
struct Spacing {
  int least, most, tile;
};

// The rotation of this many jobs on one block per SM. If there is not enough memory for its sums, there is a single sum, and
// all jobs visit the tiles in the same order.
inline Rotation rotation(std::int64_t jobs, int tiles, Spacing apart, int multiprocessors,
                         std::int64_t most_sums) {
  const std::int64_t rounds = parts_of(jobs, multiprocessors), at_once = parts_of(jobs, rounds);
  const std::int64_t parts = std::int64_t{tiles} * apart.tile,
                     densest = std::max<std::int64_t>(parts / apart.least, 1);
  std::int64_t groups = parts_of(at_once, densest);
  // The first jobs of another round wait for the last jobs of all earlier periods, which must run at the same time.
  while (rounds > 1 && groups * parts_of(at_once, groups) > multiprocessors) ++groups;
  Rotation spread{tiles, static_cast<int>(groups), static_cast<int>(parts_of(at_once, groups))};
  if (spread.period > 1)
    spread.spread = static_cast<int>(std::min<std::int64_t>(tiles, spread.period * apart.most / apart.tile));
  return spread.sums() <= most_sums ? spread : Rotation{tiles};
}

}  // namespace monoidreduce
