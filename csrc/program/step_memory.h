// The memory of one step of a program, for every rank, as a sketch (program/sketch.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "exchange/mesh_exchange.h"
#include "moves/plan.h"
#include "moves/rank_classes.h"
#include "program/sketch.h"
#include "program/transfer_method.h"

namespace shardwright {

// Sketches one step: emits the instructions of compile_step, reduced to the buffers that they name.
class StepMemory {
 public:
  virtual ~StepMemory() = default;

  // Returns true if the rank needs the same memory in this step as a rank for which this function was called before.
  // Returns false for steps of several rounds, whose peak also depends on the next step.
  virtual bool is_like_earlier_rank(Rank /*rank*/) { return false; }

  // Emits the instructions of a rank that takes part in the step. `current` and `next` are the buffers before and after
  // the step.
  virtual void sketch_rank(Sketch& sketch, Rank rank, int current, int next) = 0;

  // Splits the classes of ranks (moves/rank_classes.h) so that all ranks of a class need the same memory in this step.
  // Throws InvariantError for crossings.
  virtual void split_classes(RankClasses& classes) const = 0;
  // Returns a rank's traffic if the rank's peak depends on nothing else, else nullopt.
  virtual std::optional<Traffic> traffic_determining_peak(Rank rank) const = 0;
  // Returns an upper bound on the traffic of every rank; nullopt if there is none.
  virtual std::optional<Traffic> traffic_upper_bound() const = 0;
};

// Return the memory of a step on one mesh (move_memory.cpp), and of a crossing or a rearrangement (exchanges.cpp). The
// step must outlive the result.
std::unique_ptr<StepMemory> memory_of_move(const Step& step, const Plan& plan);
std::unique_ptr<StepMemory> memory_of_crossing(const Step& step, const Plan& plan);

// The messages that one rank sends and receives in one round, by ascending member of the group.
struct RoundMessages {
  RunOfMessages sent;
  RunOfMessages received;
};

// The two ways to send one round as an all-to-all: without the rank's own part, and with it as a message to itself
// (sends_own_part in transfer_method.h). Messages are given by their Extent (exchange/mesh_exchange.h).
struct AllToAllOptions {
  RoundMessages without_own;
  RoundMessages with_own;

  // Adds the messages to and from the next peer. Peers and the own part are added by ascending member of the group.
  void add_peer(const Extent& sent, const Extent& received) {
    add(without_own, sent, received);
    add(with_own, sent, received);
  }
  // Adds the rank's own part.
  void add_own(const Extent& own) { add(with_own, own, own); }

  // Numbers of elements: of the messages to and from all peers, and of the own part.
  struct Totals {
    int64_t sent = 0;
    int64_t received = 0;
    int64_t own = 0;
  };
  // Returns true if further messages cannot change which of the four RunOfMessages are runs: each has all of its
  // messages, or is no run already.
  bool are_complete(const Totals& totals) const {
    const auto is_complete = [](const RunOfMessages& messages, int64_t total) {
      return !messages.is_run() || messages.total() == total;
    };
    return is_complete(without_own.sent, totals.sent) && is_complete(without_own.received, totals.received) &&
           is_complete(with_own.sent, totals.sent + totals.own) &&
           is_complete(with_own.received, totals.received + totals.own);
  }
  // Sets the totals, if not all messages were added.
  void set_totals(const Totals& totals) {
    without_own.sent.set_total(totals.sent);
    without_own.received.set_total(totals.received);
    with_own.sent.set_total(totals.sent + totals.own);
    with_own.received.set_total(totals.received + totals.own);
  }

 private:
  static void add(RoundMessages& messages, const Extent& sent, const Extent& received) {
    messages.sent.add(sent.count, sent.first_held, sent.is_contiguous_held);
    messages.received.add(received.count, received.first_needed, received.is_contiguous_needed);
  }
};

// Counts for one round of messages. A message that is one run in the tensor is sent from the tensor or received into it
// (in place). All other messages are packed into staging memory, or unpacked from it.
struct PackingCounts {
  int64_t packed_elements = 0;
  int64_t unpacked_elements = 0;
  int64_t num_sent_in_place = 0;      // messages
  int64_t num_received_in_place = 0;  // messages

  // Add `times` equal messages.
  void add_sent(const Extent& message, int64_t times) {
    if (!message.is_contiguous_held) packed_elements += message.count * times;
    if (message.is_contiguous_held && message.count > 0) num_sent_in_place += times;
  }
  void add_received(const Extent& message, int64_t times) {
    if (!message.is_contiguous_needed) unpacked_elements += message.count * times;
    if (message.is_contiguous_needed && message.count > 0) num_received_in_place += times;
  }
};

// Add the instructions of one round to the sketch, as `exchange` in transfers.h emits them: an all-to-all, or messages.
// `own` is the number of elements that stay on the rank; round 0 of `rounds` copies them, unless the all-to-all sends
// them.
void sketch_all_to_all(Sketch& sketch, const AllToAllOptions& options, int64_t own, int64_t round, int64_t rounds,
                       int current, int next);
void sketch_messages(Sketch& sketch, const PackingCounts& counts, int64_t own, int64_t round, int current, int next);

}  // namespace shardwright
