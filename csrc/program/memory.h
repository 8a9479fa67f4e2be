// What programs allocate, without writing them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "moves/plan.h"

namespace shardwright {

class StepMemory;

// The buffers of compile(plan, position) by their sizes and lives, for many positions of one plan. Lists no boxes, and
// looks at a group of ranks once for all its members.
class ProgramMemory {
 public:
  explicit ProgramMemory(const Plan& plan);
  ~ProgramMemory();

  // As Program::peak_bytes_by_step says of compile(plan, position).
  std::vector<int64_t> peak_bytes_by_step(int64_t position);

 private:
  const Plan& plan_;
  std::vector<std::unique_ptr<StepMemory>> steps_;
};

}  // namespace shardwright
