// What programs allocate, without writing them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moves/plan.h"

namespace shardwright {

class StepMemory;

// What the worst rank allocates; less than that where is_exact is false.
struct PeakBytes {
  int64_t bytes = 0;
  bool is_exact = true;

  PeakBytes() = default;
  PeakBytes(int64_t exact) : bytes(exact) {}  // NOLINT: a figure that is known
  PeakBytes(int64_t seen, bool exact) : bytes(seen), is_exact(exact) {}
};

// The buffers of compile(plan, rank) by their sizes and lives, for many ranks of one plan. Lists no boxes, and
// looks at a group of ranks once for all its members.
class ProgramMemory {
 public:
  explicit ProgramMemory(const Plan& plan);
  ~ProgramMemory();

  // As Program::peak_bytes_by_step says of compile(plan, rank).
  std::vector<int64_t> peak_bytes_by_step(Rank rank);

  // The most of any rank, by step. One rank of each class (moves/extremes.h) is looked at; of more than `at_most`
  // classes, the outermost and boundary ones: is_exact is false where others might need more.
  struct Worst {
    std::vector<int64_t> bytes;
    bool is_exact = true;
  };
  Worst worst_peak_bytes_by_step(int64_t at_most);

 private:
  // As if the plan had this step alone, what is held before being a buffer of its own but for the first step.
  // `position` is that on the mesh of the step.
  int64_t peak_of_step(size_t step, int64_t position);

  const Plan& plan_;
  std::vector<std::unique_ptr<StepMemory>> steps_;
};

}  // namespace shardwright
