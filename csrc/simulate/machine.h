// The simulated ranks: their memory, instructions and messages. The n-th send on a route matches its n-th receive, and
// the n-th collective of a rank in a group matches the n-th of the other members, as in a process group.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

#include "program/program.h"

namespace shardwright {

// The simulated ranks, each a Process with its own program. An element of any dtype is stored as one double.
class Machine {
 public:
  using Payload = std::vector<double>;  // the elements of a buffer, message or contribution

  // Adds a process that runs the program of a rank. `inputs` has the elements of its inputs, then of its destinations.
  // Throws InvariantError for another number of inputs, or if the rank was added before.
  void add(Rank rank, Program program, std::vector<Payload> inputs);

  // Runs all ranks to the end. Throws InvariantError on a deadlock (all unfinished ranks wait), or if a sent message
  // was not received.
  void run();

  // Return the elements of a rank's output or destination after run().
  const Payload& output(Rank rank, size_t index = 0) const;
  const Payload& destination(Rank rank, size_t index) const;
  // Return the bytes that a rank received, and the most bytes that it allocated at once for outputs, temporaries and
  // scratch (Program::scratch_bytes).
  int64_t received_bytes(Rank rank) const { return processes_.at(rank).received_bytes; }
  int64_t peak_bytes(Rank rank) const { return processes_.at(rank).peak_bytes; }

 private:
  // A member's contribution to a collective.
  struct Contribution {
    Payload values;
    std::vector<int64_t> send_counts;  // for an all_to_all
  };

  // Identifies a channel for messages: the ranks of the group, the sender, the receiver.
  using Route = std::tuple<std::vector<Rank>, Rank, Rank>;

  // The state of one rank.
  struct Process {
    Rank rank;
    Program program;
    std::vector<Payload> buffers;
    std::vector<bool> alive;  // by buffer: it is allocated now
    size_t next_instruction = 0;
    int64_t live_bytes = 0;
    int64_t peak_bytes = 0;
    int64_t received_bytes = 0;
    Program::Lifetimes lifetimes;
    // Number of collectives started so far, by the ranks of the group. The n-th collective that one member starts in a
    // group matches the n-th of every other member: it is call n of the group.
    std::map<std::vector<Rank>, int64_t> calls;
    // A ticket is the index of the instruction that started a transfer.
    std::map<int, int64_t> call_of_ticket;  // number of the call of each collective started
    std::set<int> fetched;                  // tickets of fetches whose data has been written
    // Number of messages sent and expected so far, by route.
    std::map<Route, int64_t> sent;
    std::map<Route, int64_t> expected;
    // By ticket: for each expected message, its number on its route.
    std::map<int, std::vector<int64_t>> messages_of_ticket;
  };

  // Runs the next instruction. Returns false if there is none or if it must wait for another rank.
  bool advance(Process& process);
  // Finishes a transfer: writes the received data. Returns false if another rank has not sent or contributed yet.
  bool finish_wait(Process& process, int ticket);
  // Start a transfer: record the data that the rank sends or contributes, and the messages that it expects.
  void start(Process& process, int instruction, const AllGather& operation);
  void start(Process& process, int instruction, const ReduceScatter& operation);
  void start(Process& process, int instruction, const AllReduce& operation);
  void start(Process& process, int instruction, const AllToAll& operation);
  void start(Process& process, int instruction, const SendReceive& operation);
  void start(Process& process, int instruction, const Offer& operation);
  void start(Process& process, int instruction, const Fetch& operation);
  // Records the rank's contribution to its next collective in a group.
  void contribute(Process& process, int instruction, int group_index, Contribution contribution);
  // Carry out an instruction that computes.
  static void execute(Process& process, const Copy& copy);
  static void execute(Process& process, const FillZero& fill);
  static void execute(Process& process, const Divide& divide);
  static void execute(Process& process, const Power& power);
  static void execute(Process& process, const Cast& cast);
  static void execute(Process& process, const Reduce& reduce);
  static void execute(Process& process, const Gemm& gemm);
  // Finishes the Fetch that a product waits for. Returns false if another rank has not offered its data yet.
  bool finish_fetch(Process& process, const Flags& flags);
  static void execute(Process& process, const Attend& attend);          // machine_attend.cpp
  static void execute(Process& process, const AttendBackward& attend);  // machine_attend.cpp
  static void execute(Process& process, const Merge& merge);            // machine_attend.cpp
  static void execute(Process& process, const Accumulate& accumulate);  // machine_attend.cpp
  // Return a reference to element i of a row of batch b and head h, or to the row's one number.
  static double& element(Process& process, const Heads& heads, int64_t b, int64_t h, int64_t row, int64_t i);
  static double& element(Process& process, const HeadRows& rows, int64_t b, int64_t h, int64_t row);
  // Returns the score of query i and key j plus the mask's bias; minus infinity if the mask hides the key.
  static double masked_score(Process& process, const std::optional<PairMask>& mask, int64_t b, int64_t h, int64_t i,
                             int64_t j, double score);
  // Returns the bytes of an element of the buffer in the program's dtype, not in the simulator's doubles.
  static int64_t item_bytes(const Process& process, const BufferRange& range);
  // data() returns the address of a range, read() its elements; write() replaces them. They throw InvariantError if the
  // buffer is not allocated now or is too small, and write() if it is an input or the lengths differ.
  static double* data(Process& process, const BufferRange& range);
  static Payload read(Process& process, const BufferRange& range);
  static void write(Process& process, const BufferRange& range, const Payload& payload);
  using ContributionsByMember = std::map<Rank, Contribution>;
  // Write the rank's result of a collective, once all members have contributed, and count the received bytes.
  void write_result(Process& process, const AllGather& operation, const ContributionsByMember& contributions);
  void write_result(Process& process, const ReduceScatter& operation, const ContributionsByMember& contributions);
  void write_result(Process& process, const AllReduce& operation, const ContributionsByMember& contributions);
  void write_result(Process& process, const AllToAll& operation, const ContributionsByMember& contributions);
  void write_result(Process&, const Offer&, const ContributionsByMember&) {}
  void write_result(Process& process, const Fetch& operation, const ContributionsByMember& contributions);
  // Returns the reduction of elements [offset, offset + count) of all contributions, in the order of ranks.
  static Payload reduced(const Group& group, ReduceOp op, const ContributionsByMember& contributions, int64_t offset,
                         int64_t count);
  // Writes all messages of a transfer. Returns false, without writing any, if one has not been sent yet.
  bool receive_messages(Process& process, const SendReceive& operation, int ticket);

  std::map<Rank, Process> processes_;
  // Contributions of the members, by the ranks of the group and the number of the call.
  std::map<std::pair<std::vector<Rank>, int64_t>, ContributionsByMember> contributions_;
  // Messages in flight. On each route the n-th message sent matches the n-th one expected, whatever the order of waits.
  std::map<std::pair<Route, int64_t>, Payload> messages_in_flight_;
};

// Combines two values in a reduction as the runtime does; avg and norm are sums here.
double combine(ReduceOp op, double a, double b);

}  // namespace shardwright
