// Work that only some may do, shared so that the busiest does the least: an exact max-flow.
#pragma once

#include <cstdint>
#include <vector>

namespace shardwright {

// A fraction in lowest terms, the denominator above 0.
struct Ratio {
  int64_t numerator = 0;
  int64_t denominator = 1;
  bool operator==(const Ratio&) const = default;
  int64_t rounded_up() const { return (numerator + denominator - 1) / denominator; }
};

// Teams of workers, all in one team alike, and jobs that may be split among the workers of some teams.
//
// By max-flow min-cut, the least load of the busiest worker is the greatest of (amount of some jobs) / (workers of all
// teams that may do any of them). least_worst_load() starts from all jobs and all workers. While the flow does not
// carry all jobs at a load, its minimum cut names jobs that need more, and their load is the next one tried. Loads
// grow, and there are finitely many sets, so the last one is exact.
struct SharedWork {
  struct Job {
    int64_t amount = 0;
    std::vector<int> pools;  // any of whose teams may do it
  };
  std::vector<Job> jobs;
  std::vector<std::vector<int>> pools;  // teams
  std::vector<int64_t> team_sizes;      // above 0
};

// Every job with an amount has a team; amounts sum to less than 2^62.
Ratio least_worst_load(const SharedWork& work);

}  // namespace shardwright
