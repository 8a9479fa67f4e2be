// Computes the memory that programs allocate, without writing the programs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/known_parts.h"
#include "moves/plan.h"

namespace shardwright {

class Sketch;
class StepMemory;

// The bytes that the worst rank allocates. If is_exact is false, they are a lower bound.
struct PeakBytes {
  int64_t bytes = 0;
  bool is_exact = true;

  PeakBytes() = default;
  PeakBytes(int64_t exact) : bytes(exact) {}  // NOLINT: implicit, for a known number
  PeakBytes(int64_t seen, bool exact) : bytes(seen), is_exact(exact) {}
};

// The sizes and lifetimes of the buffers of compile(plan, rank), for many ranks of one plan. Lists no boxes, and
// examines each group of ranks once for all its members.
class ProgramMemory {
 public:
  explicit ProgramMemory(const Plan& plan);
  ~ProgramMemory();

  // Returns Program::peak_bytes_by_step of compile(plan, rank).
  std::vector<int64_t> peak_bytes_by_step(Rank rank);

  // The maximum over all ranks, by step. One rank of each class (moves/extremes.h) is examined; if there are more than
  // `at_most` classes, only the outermost and boundary ones. is_exact is false if other ranks might need more.
  struct Worst {
    std::vector<int64_t> bytes;
    bool is_exact = true;
  };
  Worst worst_peak_bytes_by_step(int64_t at_most);

 private:
  // Writes all steps, and returns the buffer that holds the result.
  int write_all(Sketch& sketch, Rank rank);
  std::vector<int64_t> peaks_in_segments(Rank rank);
  struct Seen {
    std::vector<Rank> ranks;
    bool are_all = true;  // true if all ranks, or one of each class, are examined
  };
  Seen seen_of(size_t step, int64_t at_most) const;
  int write(Sketch& sketch, size_t step, Rank rank, int current);
  // Returns the peak as if the plan had only this step. The part held before the step is a buffer, except in the first
  // step.
  int64_t peak_of_step(size_t step, Rank rank);

  const Plan& plan_;
  std::vector<std::unique_ptr<StepMemory>> steps_;
  std::vector<KnownParts> before_;  // indexed by step
  std::vector<KnownParts> after_;
  std::unique_ptr<Sketch> sketch_;  // reused for each step
  // For plans in segments, which leave the fields above empty: the plan of each segment, or one for all if they are
  // uniform.
  std::vector<Plan> plans_;
  std::vector<std::unique_ptr<ProgramMemory>> segments_;
};

}  // namespace shardwright
