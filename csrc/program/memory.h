// Computes the memory that programs allocate, without compiling the programs: from sketches (program/sketch.h), which
// have the sizes of buffers and the instructions that use them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/known_parts.h"
#include "moves/plan.h"

namespace shardwright {

class Sketch;
class StepMemory;

// The most bytes that a rank allocates at once, over all ranks. If is_exact is false, other ranks may need more.
struct PeakBytes {
  int64_t bytes = 0;
  bool is_exact = true;

  PeakBytes() = default;
  PeakBytes(int64_t exact) : bytes(exact) {}  // NOLINT: implicit, for a known number
  PeakBytes(int64_t peak, bool exact) : bytes(peak), is_exact(exact) {}
};

// The ranks to examine for the largest peak.
struct ExaminedRanks {
  std::vector<Rank> ranks;
  // True: these are all ranks, or one rank of each class (moves/rank_classes.h), so no other rank has a larger peak.
  bool are_complete = true;
};

// Computes the peak memory of compile(plan, rank), for many ranks of one plan, from the sizes and lifetimes of the
// program's buffers. It never lists the boxes of copies, and examines each group of ranks once for all members of the
// group.
class ProgramMemory {
 public:
  // The plan must outlive the object.
  explicit ProgramMemory(const Plan& plan);
  ~ProgramMemory();

  // Returns the same numbers as compile(plan, rank).peak_bytes_by_step().
  std::vector<int64_t> peak_bytes_by_step(Rank rank);

  struct MaxPeaks {
    std::vector<int64_t> bytes;  // by step: the largest peak of a rank
    bool is_exact = true;        // false: ranks that were not examined might need more
  };
  // Returns the maximum of peak_bytes_by_step over all ranks. Examines one rank of each class (moves/rank_classes.h),
  // or up to about `max_ranks` ranks: if there are more classes, ranks at the ends of the mesh and at boundaries of
  // classes; for crossings and plans in segments, evenly spaced ranks.
  MaxPeaks max_peak_bytes_by_step(int64_t max_ranks);

 private:
  // Adds all steps of a rank to the sketch. Returns the buffer that holds the result.
  int sketch_all(Sketch& sketch, Rank rank);
  // Returns the rank's peak in each step, in elements, for a plan in segments.
  std::vector<int64_t> peaks_in_segments(Rank rank);
  // Returns the ranks whose peaks in this step are computed: at most about `max_ranks`.
  ExaminedRanks ranks_to_examine(size_t step, int64_t max_ranks) const;
  // Adds one step of a rank to the sketch, starting from the buffer `current`. Returns the buffer that holds the step's
  // result, which has no elements if the rank is on neither mesh of the step.
  int sketch_step(Sketch& sketch, size_t step, Rank rank, int current);
  // Returns the peak bytes of a rank in one step, as if the plan had only this step. The part held before the step is a
  // buffer, except in the first step, where it is the input.
  int64_t peak_of_step(size_t step, Rank rank);

  const Plan& plan_;
  std::vector<std::unique_ptr<StepMemory>> steps_;  // by step
  std::vector<KnownParts> before_;                  // the ranks' parts before each step
  std::vector<KnownParts> after_;                   // the ranks' parts after each step
  std::unique_ptr<Sketch> sketch_;                  // reused for each step
  // For plans in segments, which leave the fields above empty: the plan of each segment, or one for all if they are
  // uniform.
  std::vector<Plan> plans_;
  std::vector<std::unique_ptr<ProgramMemory>> segments_;  // one for each of plans_
};

}  // namespace shardwright
