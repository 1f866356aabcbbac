// In which order jobs take the tiles that all of them add to, where each sum is to have one order.
//
// If all took the tiles in one order, each job would wait for the one before at its first tile, and the last would begin when all
// others had been there. So each begins some tiles after the one before, and goes down from there, and round the end to the last
// tile: wherever a job comes, the one before has been earlier. Down to tile 0 a job adds to one sum, and then to another: it waits
// for jobs before it alone, where with one sum the first job, round the end, would wait for the last.
//
// Where tiles are so few that jobs would come too close, they are in groups, with sums of their own.
#pragma once

#include <algorithm>
#include <cstdint>

#include "monoidreduce/kernel/parts.h"
#include "monoidreduce/math.h"

namespace monoidreduce {

struct Rotation {
  int tiles;
  int groups = 1;      // job j is of group j % groups
  int period = 1;      // jobs of a group that begin apart; the next ones begin where these did
  int spread = tiles;  // the tiles that they begin in, at most one in each

  // A period of one job begins with the last tile and never goes round the end.
  MR_HD int sums_of_group() const { return period == 1 ? 1 : 2; }
  MR_HD int sums() const { return groups * sums_of_group(); }

  struct Member {
    int group, round, rank;  // round: which period; rank: in it
  };
  MR_HD Member member(int job) const {
    const int of_group = job / groups;
    return {job % groups, of_group / period, of_group % period};
  }
  MR_HD int first(const Member& job) const { return (job.rank + 1) * spread / period - 1; }

  // The sum that a job adds to at a tile, and how many jobs do so before it.
  struct Turn {
    int sum, before;
  };
  MR_HD Turn turn(const Member& job, int tile) const {
    // Jobs of a period that begin below the tile, and come to it round the end.
    const int reached = ((tile + 1) * period - 1) / spread, below = reached < period ? reached : period;
    const bool round_end = job.rank < below;
    return {sums_of_group() * job.group + (round_end ? 1 : 0),
            round_end ? job.round * below + job.rank : job.round * (period - below) + job.rank - below};
  }
};

// How far jobs are apart that follow one another, in parts of a tile: at least so much that what one has added is there when the next
// one comes, and at most so much that what jobs read at a time stays in the second-level cache.
struct Spacing {
  int least, most, tile;
};

// Of so many jobs, which as many blocks take as there are multiprocessors. With memory for fewer sums than that takes there is
// one, and all jobs take the tiles in one order.
inline Rotation rotation(std::int64_t jobs, int tiles, Spacing apart, int multiprocessors,
                         std::int64_t most_sums) {
  const std::int64_t rounds = parts_of(jobs, multiprocessors), at_once = parts_of(jobs, rounds);
  const std::int64_t parts = std::int64_t{tiles} * apart.tile,
                     densest = std::max<std::int64_t>(parts / apart.least, 1);
  std::int64_t groups = parts_of(at_once, densest);
  // A further round's first jobs wait for the last ones of all periods before: these have to run with the others.
  while (rounds > 1 && groups * parts_of(at_once, groups) > multiprocessors) ++groups;
  Rotation spread{tiles, static_cast<int>(groups), static_cast<int>(parts_of(at_once, groups))};
  if (spread.period > 1)
    spread.spread = static_cast<int>(std::min<std::int64_t>(tiles, spread.period * apart.most / apart.tile));
  return spread.sums() <= most_sums ? spread : Rotation{tiles};
}

}  // namespace monoidreduce
