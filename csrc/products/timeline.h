// Predicts when each instruction of a program begins and ends.
//
// There are two lanes, compute and communication, each in the order of the program. Compute stops at a Wait until the
// transfer has ended. A transfer begins when the transfer before it and the instruction that it must come after have
// ended, and takes as long as the plan's topology predicts.
//
// On a host (a GemmModel of one processor) a transfer comes after everything before it in the program, because the host
// goes through the program step by step. A product is slowed by the model's contention during transfers, and
// the transfer of each chunk takes chunk_ps longer than the topology predicts.
//
// Devices run asynchronously to their host, and a transfer comes after the instructions that concern its memory
// (program/order.h). But transfers are kernels too, and need the model's transfer_processors for full speed:
//
//   - If a product is running that leaves no processors, a transfer that becomes ready begins when the product ends. So
//     does a transfer that an instruction of compute releases at the moment when the product begins: the product
//     starts first. A transfer that is already running slows the product by the model's contention for as long as
//     both run.
//   - Products started while transfers are under way leave Program::sms_left processors free: they have that many
//     fewer, and are not slowed otherwise. A transfer that becomes ready meanwhile begins with the next wave of tiles.
//     It takes longer if it finds fewer processors than full speed needs.
//   - The data of a product with flags is copied by copy engines, which need no processors: neither slows the other.
//
// If copy engines carry out all transfers (transfer_processors is 0), a transfer begins once it is ready, and is
// started while the transfer before it runs, so that only the first of several in a row takes the topology's step_ps.
// Products are slowed by the model's contention.
//
// The model leaves out how transfers, copies and products share memory bandwidth on devices, and the delay between an
// event and the work that waits for it.
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
  std::vector<Span> spans;  // of all instructions except Waits
  int64_t total_ps = 0;
  int64_t communication_ps = 0;  // sum over all transfers, each at full speed
  int64_t gemm_ps = 0;           // sum over all products, without contention
};

Timeline predict(const Program& program, const Plan& plan, const GemmModel& model);
// Predicts a program whose groups are on this mesh.
Timeline predict(const Program& program, const Topology& topology, const Mesh& mesh, const GemmModel& model);

// Predicts the program of position 0, which has at least as much to do as any other rank.
Timeline predict(const Matmul& matmul, const Schedule& schedule, const GemmModel& model);

struct Prediction {
  Schedule schedule;
  int64_t total_ps = 0;
};

// The depths compared are 1, this one, and the number of chunks.
constexpr int64_t kUsualDepth = 3;
// A larger depth, or leaving processors to transfers, must save this much.
constexpr int64_t kLeastTuningPercent = 1;
// A schedule other than serial must save this much.
constexpr int64_t kLeastGainPercent = 2;

// Returns serial first, then each method with 1, 2, 4, 8, W and 2W chunks for W partners, without duplicates, and with
// 16 and 32 if the number before was the method's fastest so far. (With n chunks, 1 / n of the shorter of product and
// transfer is never hidden.) Each has the depth, and on devices the number of processors left to transfers, that is
// predicted to be fastest. A given `depth` is used unchanged. Otherwise two rules limit the depth: all chunks at once
// must not need more memory than serial, or than depth 1 if that needs more; and rings of more than two ranks on hosts
// keep depth 1, because concurrent messages to several ranks share a link, so the first of them are received later than
// predicted.
std::vector<Prediction> predictions(const Matmul& matmul, const GemmModel& model,
                                    std::optional<int64_t> depth = std::nullopt);

// Returns the schedule with the depth (unless it is given) and the processors left to transfers that are predicted to
// be fastest, by the same rules.
Schedule tuned(const Matmul& matmul, const Schedule& schedule, const GemmModel& model,
               std::optional<int64_t> depth = std::nullopt);

// Returns the schedule that is predicted to be fastest, or serial unless another one saves kLeastGainPercent. It
// depends on global layouts and tables alone, so all ranks make the same choice.
Schedule choose(const Matmul& matmul, const GemmModel& model, std::optional<int64_t> depth = std::nullopt);

}  // namespace shardwright
