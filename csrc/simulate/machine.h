// The simulated ranks: memory, instructions, and messages, which are matched in the same way as process groups match
// them.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "program/program.h"

namespace shardwright {

class Machine {
 public:
  using Payload = std::vector<double>;

  // Adds a process for the rank. It runs the program on these inputs, which are followed by the destinations.
  void add(Rank rank, Program program, std::vector<Payload> inputs);

  // Runs all ranks to the end. Throws InvariantError on a deadlock: all unfinished ranks wait.
  void run();

  const Payload& output(Rank rank, size_t index = 0) const;
  const Payload& destination(Rank rank, size_t index) const;
  int64_t received_bytes(Rank rank) const { return processes_.at(rank).received_bytes; }
  int64_t peak_bytes(Rank rank) const { return processes_.at(rank).peak_bytes; }

 private:
  // A member's contribution to a collective.
  struct Contribution {
    Payload values;
    std::vector<int64_t> send_counts;  // for an all_to_all
  };

  // The ranks of the group, the sender, the receiver.
  using Route = std::tuple<std::vector<Rank>, Rank, Rank>;

  struct Process {
    Rank rank;
    Program program;
    std::vector<Payload> buffers;
    std::vector<bool> alive;
    size_t next_instruction = 0;
    int64_t live_bytes = 0;
    int64_t peak_bytes = 0;
    int64_t received_bytes = 0;
    Program::Lifetimes lifetimes;
    // Number of collectives started so far, by the ranks of the group. The n-th calls of all members match.
    std::map<std::vector<Rank>, int64_t> calls;
    std::map<int, int64_t> call_of_ticket;
    std::set<int> fetched;  // tickets of complete fetches
    // Number of messages sent and expected so far, by route.
    std::map<Route, int64_t> sent;
    std::map<Route, int64_t> expected;
    std::map<int, std::vector<int64_t>> messages_of_ticket;
  };

  bool advance(Process& process);
  // Returns false if the transfer cannot complete yet.
  bool finish_wait(Process& process, int ticket);
  void start(Process& process, int instruction, const AllGather& operation);
  void start(Process& process, int instruction, const ReduceScatter& operation);
  void start(Process& process, int instruction, const AllReduce& operation);
  void start(Process& process, int instruction, const AllToAll& operation);
  void start(Process& process, int instruction, const SendReceive& operation);
  void start(Process& process, int instruction, const Offer& operation);
  void start(Process& process, int instruction, const Fetch& operation);
  void give(Process& process, int instruction, int group_index, Contribution given);
  static void execute(Process& process, const Copy& copy);
  static void execute(Process& process, const FillZero& fill);
  static void execute(Process& process, const Divide& divide);
  static void execute(Process& process, const Power& power);
  static void execute(Process& process, const Cast& cast);
  static void execute(Process& process, const Reduce& reduce);
  static void execute(Process& process, const Gemm& gemm);
  // Receives the chunks that a product waits for, if possible. Returns true if all of them are received.
  bool chunks_arrive(Process& process, const Flags& flags);
  static void execute(Process& process, const Attend& attend);          // machine_attend.cpp
  static void execute(Process& process, const AttendBackward& attend);  // machine_attend.cpp
  static void execute(Process& process, const Merge& merge);            // machine_attend.cpp
  static void execute(Process& process, const Accumulate& accumulate);  // machine_attend.cpp
  static double& element(Process& process, const Heads& heads, int64_t b, int64_t h, int64_t row, int64_t i);
  static double& element(Process& process, const HeadRows& rows, int64_t b, int64_t h, int64_t row);
  // Returns the score plus the mask's bias; minus infinity if the query does not see the key.
  static double masked(Process& process, const std::optional<PairMask>& mask, int64_t b, int64_t h, int64_t i,
                       int64_t j, double score);
  static int64_t item_bytes(const Process& process, const BufferRange& range);
  static double* data(Process& process, const BufferRange& range);
  static Payload read(Process& process, const BufferRange& range);
  static void write(Process& process, const BufferRange& range, const Payload& payload);
  // Writes the rank's result of a collective, once all members have contributed.
  using GivenByMember = std::map<Rank, Contribution>;
  void deliver(Process& process, const AllGather& operation, const GivenByMember& given);
  void deliver(Process& process, const ReduceScatter& operation, const GivenByMember& given);
  void deliver(Process& process, const AllReduce& operation, const GivenByMember& given);
  void deliver(Process& process, const AllToAll& operation, const GivenByMember& given);
  void deliver(Process&, const Offer&, const GivenByMember&) {}
  void deliver(Process& process, const Fetch& operation, const GivenByMember& given);
  static Payload reduced(const Group& group, ReduceOp op, const GivenByMember& given, int64_t offset, int64_t count);
  bool receive_messages(Process& process, const SendReceive& operation, int ticket);

  std::map<Rank, Process> processes_;
  // Contributions of the members, by the ranks of the group and the number of the call.
  std::map<std::pair<std::vector<Rank>, int64_t>, GivenByMember> given_;
  // Messages in flight. On each route the n-th message sent matches the n-th one expected, whatever the order of waits.
  std::map<std::pair<Route, int64_t>, Payload> mail_;
};

// Combines two values in a reduction as the runtime does; avg and norm are sums here.
double combine(ReduceOp op, double a, double b);

}  // namespace shardwright
