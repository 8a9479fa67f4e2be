// The simulated ranks: memory, instructions, and messages that match as process groups match them.
#pragma once

#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "program/program.h"

namespace shardwright {

class Machine {
 public:
  using Payload = std::vector<double>;

  // One program per position, and its inputs; rank numbers come from the programs' groups.
  Machine(std::vector<Program> programs, std::vector<std::vector<Payload>> inputs);

  // Runs all ranks to the end. Throws InvariantError if none can go on.
  void run();

  const Payload& output(int64_t position, size_t index = 0) const;
  int64_t received_bytes(int64_t position) const { return ranks_[position].received_bytes; }
  int64_t peak_bytes(int64_t position) const { return ranks_[position].peak_bytes; }

 private:
  // What a member puts into a collective.
  struct Given {
    Payload values;
    std::vector<int64_t> send_counts;  // of an all_to_all
  };

  // Members of the group, sender, receiver.
  using Route = std::tuple<std::vector<int64_t>, int64_t, int64_t>;

  struct Rank {
    std::vector<Payload> buffers;
    std::vector<bool> alive;
    size_t next_instruction = 0;
    int64_t live_bytes = 0;
    int64_t peak_bytes = 0;
    int64_t received_bytes = 0;
    Program::Lifetimes lifetimes;
    // Collectives started on each group so far (by members), to match the n-th with the n-th.
    std::map<std::vector<int64_t>, int64_t> calls;
    std::map<int, int64_t> call_of_ticket;
    // The same of messages, by whom they go to and come from.
    std::map<Route, int64_t> sent;
    std::map<Route, int64_t> expected;
    std::map<int, std::vector<int64_t>> messages_of_ticket;
  };

  bool advance(int64_t position);
  // False where the transfer cannot end yet.
  bool finish_wait(int64_t position, int ticket);
  void start(int64_t position, int instruction, const AllGather& operation);
  void start(int64_t position, int instruction, const ReduceScatter& operation);
  void start(int64_t position, int instruction, const AllReduce& operation);
  void start(int64_t position, int instruction, const AllToAll& operation);
  void start(int64_t position, int instruction, const SendReceive& operation);
  void give(int64_t position, int instruction, int group_index, Given given);
  void execute(int64_t position, const Copy& copy);
  void execute(int64_t position, const FillZero& fill);
  void execute(int64_t position, const Divide& divide);
  void execute(int64_t position, const Power& power);
  void execute(int64_t position, const Cast& cast);
  void execute(int64_t position, const Reduce& reduce);
  void execute(int64_t position, const Gemm& gemm);
  int64_t item_bytes(int64_t position, const BufferRange& range) const;
  double* data(int64_t position, const BufferRange& range);
  Payload read(int64_t position, const BufferRange& range);
  void write(int64_t position, const BufferRange& range, const Payload& payload);
  // What a collective brings to the rank, once all members have given.
  using GivenByMember = std::map<int64_t, Given>;  // by position
  void deliver(int64_t position, const AllGather& operation, const GivenByMember& given);
  void deliver(int64_t position, const ReduceScatter& operation, const GivenByMember& given);
  void deliver(int64_t position, const AllReduce& operation, const GivenByMember& given);
  void deliver(int64_t position, const AllToAll& operation, const GivenByMember& given);
  static Payload reduced(const Group& group, ReduceOp op, const GivenByMember& given, int64_t offset, int64_t count);
  bool receive_messages(int64_t position, const SendReceive& operation, int ticket);

  std::vector<Program> programs_;
  std::vector<Rank> ranks_;
  // (members, n-th call) -> what each member gave
  std::map<std::pair<std::vector<int64_t>, int64_t>, std::map<int64_t, Given>> given_;
  // Messages under way: the n-th that was sent is the n-th that was to be received, whichever is waited for first.
  std::map<std::pair<Route, int64_t>, Payload> mail_;
};

// One step of a reduction, as the runtime computes it; avg and norm are sums here.
double combine(ReduceOp op, double a, double b);

}  // namespace shardwright
