// Computes how much memory programs allocate without writing the programs.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "exchange/known_parts.h"
#include "moves/plan.h"

namespace shardwright {

class Sketch;
class StepMemory;

// The bytes that the worst rank allocates; if is_exact is false, a lower bound of that.
struct PeakBytes {
  int64_t bytes = 0;
  bool is_exact = true;

  PeakBytes() = default;
  PeakBytes(int64_t exact) : bytes(exact) {}  // NOLINT: a figure that is known
  PeakBytes(int64_t seen, bool exact) : bytes(seen), is_exact(exact) {}
};

// The sizes and lifetimes of the buffers of compile(plan, rank), for many ranks of one plan. It lists no boxes, and
// examines a group of ranks once for all its members.
class ProgramMemory {
 public:
  explicit ProgramMemory(const Plan& plan);
  ~ProgramMemory();

  // Returns the same as Program::peak_bytes_by_step of compile(plan, rank).
  std::vector<int64_t> peak_bytes_by_step(Rank rank);

  // The most that any rank needs, by step. One rank of each class (moves/extremes.h) is examined; if there are more
  // than `at_most` classes, the outermost and boundary ones. is_exact is false if others might need more.
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
    bool are_all = true;  // all ranks, or one of each class
  };
  Seen seen_of(size_t step, int64_t at_most) const;
  int write(Sketch& sketch, size_t step, Rank rank, int current);
  // Returns the peak as if the plan had only this step. Except for the first step, the part held before is a buffer.
  int64_t peak_of_step(size_t step, Rank rank);

  const Plan& plan_;
  std::vector<std::unique_ptr<StepMemory>> steps_;
  std::vector<KnownParts> before_;  // by step
  std::vector<KnownParts> after_;
  std::unique_ptr<Sketch> sketch_;  // of one step, again and again
  // Of plans in segments: their plans, or one for all if they are alike. Such plans have no steps of their own.
  std::vector<Plan> plans_;
  std::vector<std::unique_ptr<ProgramMemory>> segments_;
};

}  // namespace shardwright
