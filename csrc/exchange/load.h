// Divides work that only some workers may do, so that the busiest worker does as little as possible, by exact max-flow.
#pragma once

#include <cstdint>
#include <vector>

namespace shardwright {

// A fraction that is not negative. The denominator is above 0. Fractions are equal only if both members are.
struct Ratio {
  int64_t numerator = 0;
  int64_t denominator = 1;
  bool operator==(const Ratio&) const = default;
  int64_t rounded_up() const { return (numerator + denominator - 1) / denominator; }
};

// Jobs that may be divided among the workers of some teams. A *team* is a number of interchangeable workers, and a
// *pool* a list of teams. The load of a worker is the sum of the amounts of work that it does.
//
// By max-flow min-cut, the least load of the busiest worker is the maximum, over sets of jobs, of (amount of the jobs)
// / (number of workers in the teams that may do any of them). min_max_load() starts with the load of the set of all
// jobs. If the flow at a load does not carry all jobs, its minimum cut is a set of jobs with a higher load, which is
// tried next. Loads grow, and there are finitely many sets, so the search ends, and the last load is exact.
//
// Example: one worker forms team 0, and two workers form team 1. Team 0 may do job A, with an amount of 6. Both teams
// may do job B, with an amount of 6.
//
//   load 4 = 12 / 3 (all jobs)    team 0 can do 4 of A's 6. The minimum cut is {A}
//   load 6 = 6 / 1  ({A})         team 0 does A, and each worker of team 1 does 3 of B. The result is 6
struct SharedWork {
  struct Job {
    int64_t amount = 0;
    std::vector<int> pools;  // indices of pools; every team of these pools may do the job
  };
  std::vector<Job> jobs;
  std::vector<std::vector<int>> pools;  // indices of teams
  std::vector<int64_t> team_sizes;      // number of workers of each team, above 0
};

// Returns the least load of the busiest worker, in lowest terms; 0 if there is no work. Every job with a positive
// amount must have a team, and the amounts must sum to less than 2^62.
Ratio min_max_load(const SharedWork& work);

// The share of a job that a team does.
struct TeamShare {
  int team = 0;  // index in SharedWork::team_sizes
  int64_t amount = 0;
};

// Returns, by job, the share of each team, such that no worker does more than `load` if teams divide their work evenly.
// Throws InvariantError if `load` is less than min_max_load().
std::vector<std::vector<TeamShare>> shared_at(const SharedWork& work, int64_t load);

}  // namespace shardwright
