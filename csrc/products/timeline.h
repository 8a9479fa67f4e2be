// When each instruction of a program is predicted to begin and end.
//
// Two lanes, each in the order of the program. Compute stops at a Wait until the transfer is there. A transfer begins
// when the one before it has ended and what it must come after has, and takes what the plan's topology says.
//
// On a host (tables of one processor) a transfer must come after all that stands before it, because the host goes
// through the program step by step. A product is slower by the table's contention while data travels.
//
// Devices run behind their host, and a transfer must come after what its memory says (program/order.h). But transfers
// are kernels too, and take kTransferProcessors for their full speed:
//
//   - One that becomes ready while a product runs that leaves none begins when the product ends; so does one that the
//     product's stream let go at the same moment, because the product gets there first. One that is there already slows
//     the product by the table's contention, as long as they run beside each other.
//   - Products given while transfers are under way leave Program::sms_left processors: they have as many fewer, and are
//     not slowed otherwise. A transfer that becomes ready then begins when the wave of tiles that runs has ended. It
//     takes longer where it finds fewer processors than its full speed needs.
//
// What this leaves out: what transfers, copies and products take from each other's memory bandwidth on devices, and the
// time from an event to what waits for it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cost/gemm_model.h"
#include "products/matmul.h"

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

// The depths that are compared are 1, this and all chunks.
constexpr int64_t kUsualDepth = 3;
// Processors that a transfer's kernel takes, as many as NCCL's channels between the GPUs of a node: not measured.
constexpr int64_t kTransferProcessors = 16;
// A larger depth, and processors left to transfers, must save this much.
constexpr int64_t kLeastTuningPercent = 1;
constexpr int64_t kLeastGainPercent = 2;

// Serial first, then every method with 1, 2, 4, 8, W and 2W chunks for W partners, as far as they differ; each with the
// depth, and on tables of more processors what is left to transfers, that is predicted fastest. A `depth` is taken as
// it is. Else all chunks at once are only compared where their peak memory is not above that of serial, or of depth 1;
// and rings of more than two ranks on hosts are compared with depth 1 alone: messages to several ranks at once share a
// link, so that the first of them come later than the lanes say.
std::vector<Prediction> predictions(const Matmul& matmul, const GemmModel& model,
                                    std::optional<int64_t> depth = std::nullopt);

// A method and chunks with the depth, unless it is given, and processors left that are predicted fastest, as above.
Schedule tuned(const Matmul& matmul, const Schedule& schedule, const GemmModel& model,
               std::optional<int64_t> depth = std::nullopt);

// The one that is predicted fastest; serial, unless another one saves kLeastGainPercent. A function of global layouts
// and of tables: all ranks choose alike.
Schedule choose(const Matmul& matmul, const GemmModel& model, std::optional<int64_t> depth = std::nullopt);

}  // namespace shardwright
