// Predicts when each instruction of a program begins and ends.
//
// There are two lanes, compute and communication, each in the order of the program. Compute stops at a Wait until the
// transfer has ended. A transfer is ready when the transfer before it and the instruction that it must come after have
// ended. It takes as long as the plan's topology predicts.
//
//   A gather on a host in 2 chunks with depth 1: products of 4 us, transfers of 5 us, no contention.
//     communication   [0, 5] chunk 1   [5, 10] chunk 2
//     compute         [0, 4] own part, Wait until 5, [5, 9] chunk 1, Wait until 10, [10, 14] chunk 2
//   It takes 14 us. One after the other, the same transfers and products take 10 + 12 = 22 us.
//
// On a host (a GemmModel of one processor) a transfer comes after everything before it in the program, because the host
// executes the program in order. A product is slowed by the model's contention during transfers, and the transfer of
// each chunk takes chunk_ps longer than the topology predicts.
//
// Devices run asynchronously to their host. A transfer comes only after the instructions that access its memory
// (program/order.h). But transfers are kernels too, and need the model's transfer_processors for full speed:
//
//   - A product may occupy all processors. A transfer that becomes ready while the product runs begins when the product
//     ends. So does a transfer that becomes ready when the product begins, if compute made the transfer ready, because
//     the product starts first. A transfer that is already running slows the product by the model's contention for as
//     long as both run.
//   - A product that starts while transfers are in flight leaves Program::sms_left processors to them. It then has so
//     many fewer processors, and is not slowed otherwise. A transfer that becomes ready meanwhile begins with the next
//     wave of tiles. It takes longer if fewer processors are left than full speed needs.
//   - The data of a product with flags is copied by copy engines, which need no processors: neither slows the other.
//
// If copy engines carry out all transfers (transfer_processors is 0), a transfer begins once it is ready. A transfer
// that follows another without a gap was started while that one ran, so it does not take the topology's step_ps again.
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

// The time that one instruction takes, in its lane.
struct Span {
  bool is_communication = false;
  int instruction = -1;  // index in the program
  int64_t start_ps = 0;
  int64_t end_ps = 0;
};

struct Timeline {
  std::vector<Span> spans;       // of all instructions except Waits
  int64_t total_ps = 0;          // end of the last instruction
  int64_t communication_ps = 0;  // sum over all transfers, each at full speed
  int64_t gemm_ps = 0;           // sum over all products, without contention
};

// Predicts the program of one rank for a plan. Uses the plan's topology and source mesh.
Timeline predict(const Program& program, const Plan& plan, const GemmModel& model);
// Predicts a program whose groups are on this mesh.
Timeline predict(const Program& program, const Topology& topology, const Mesh& mesh, const GemmModel& model);

// Predicts the program of position 0, which has at least as much to do as any other rank. Throws as compile() does.
Timeline predict(const Matmul& matmul, const Schedule& schedule, const GemmModel& model);

// A schedule and its predicted time.
struct Prediction {
  Schedule schedule;
  int64_t total_ps = 0;
};

// predictions() compares the depths 1, kUsualDepth, and the number of chunks.
constexpr int64_t kUsualDepth = 3;
// A larger depth, or leaving processors to transfers, is chosen if it saves more than this percentage of the time.
constexpr int64_t kLeastTuningPercent = 1;
// A schedule other than serial is chosen if it saves at least this percentage of the time of serial.
constexpr int64_t kLeastGainPercent = 2;

// Returns the schedules to compare, with their predictions: serial first, then collectives and rings of 1, 2, 4, 8, W
// and 2W chunks for W partners. Returns serial alone if no step can be chunked (why_only_serial). A ring has at least 2
// chunks; rings are left out if has_ring() is false or W is above 64. A method is also tried with 16 and 32 chunks if
// the number tried before was its fastest: with n chunks, 1 / n of the shorter of product and transfer is never hidden.
//
// Each schedule has the depth, and on devices the number of processors left to transfers, that is predicted to be
// fastest. A given `depth` is used unchanged. Otherwise two rules limit the depth:
//
//   - A depth above kUsualDepth must not need more memory than serial, or than depth 1 if depth 1 needs more.
//   - Rings of more than two ranks on hosts keep depth 1. Concurrent messages to several ranks share a link, so the
//     first of them are received later than predicted.
std::vector<Prediction> predictions(const Matmul& matmul, const GemmModel& model,
                                    std::optional<int64_t> depth = std::nullopt);

// Returns `schedule` with the depth and the number of processors left to transfers that are predicted to be fastest, by
// the rules of predictions(). Returns it unchanged for methods serial and flags.
Schedule tuned_schedule(const Matmul& matmul, const Schedule& schedule, const GemmModel& model,
                        std::optional<int64_t> depth = std::nullopt);

// Returns the schedule that is predicted to be fastest, but serial unless the fastest saves at least kLeastGainPercent
// of the time of serial. The choice depends on global layouts and tables alone, so all ranks choose the same schedule.
Schedule choose_fastest(const Matmul& matmul, const GemmModel& model, std::optional<int64_t> depth = std::nullopt);

}  // namespace shardwright
