// When each instruction of a program is predicted to begin and end.
//
// Two lanes. Compute goes on in order; a transfer begins when the one before it has ended and compute has come to it,
// and takes what the plan's topology says; compute stops at a Wait until the transfer is there. A product that runs
// while data travels is slower by the model's contention.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "overlap/gemm_model.h"
#include "overlap/matmul.h"

namespace shardwright {

struct Span {
  bool is_communication = false;
  int instruction = -1;  // index in the program
  int64_t start_ps = 0;
  int64_t end_ps = 0;
};

struct Timeline {
  std::vector<Span> spans;  // no Waits
  int64_t total_ps = 0;
  int64_t communication_ps = 0;  // all transfers, as if nothing else went on
  int64_t gemm_ps = 0;           // all products, without contention
};

Timeline predict(const Program& program, const Plan& plan, const GemmModel& model);

// Of a schedule on position 0, which has no less to do than any other rank.
Timeline predict(const Matmul& matmul, const Schedule& schedule, const GemmModel& model);

struct Prediction {
  Schedule schedule;
  int64_t total_ps = 0;
};

// Serial first, then every method with 1, 2, 4, W and 2W chunks for W partners, as far as they differ.
std::vector<Prediction> predictions(const Matmul& matmul, const GemmModel& model);

// The one that is predicted fastest; serial, unless another one saves kLeastGainPercent. A function of global layouts
// and of tables: all ranks choose alike.
constexpr int64_t kLeastGainPercent = 2;
Schedule choose(const Matmul& matmul, const GemmModel& model);

}  // namespace shardwright
