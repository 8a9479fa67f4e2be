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

// Emits the same instructions as compile_step, reduced to the buffers that they name.
class StepMemory {
 public:
  virtual ~StepMemory() = default;

  // Returns true if the rank needs the same memory in this step as the rank of an earlier call. Must return false for
  // steps of several rounds, whose peak also depends on the next step.
  virtual bool repeats_a_rank(Rank /*rank*/) { return false; }

  // Emits the instructions of a rank that takes part in the step. `current` and `next` are the buffers before and after
  // the step.
  virtual void write(Sketch& sketch, Rank rank, int current, int next) = 0;

  // Splits the classes of ranks so that all ranks of a class need the same memory. Throws InvariantError for crossings.
  virtual void split_classes(RankClasses& classes) const = 0;
  // Returns a rank's traffic if its peak depends on nothing else, else nullopt.
  virtual std::optional<Traffic> traffic_that_decides(Rank rank) const = 0;
  // Returns an upper bound on the traffic of every rank; nullopt if there is none.
  virtual std::optional<Traffic> traffic_upper_bound() const = 0;
};

// Return the memory of a step on one mesh (move_memory.cpp), and of a crossing (exchanges.cpp).
std::unique_ptr<StepMemory> memory_of_move(const Step& step, const Plan& plan);
std::unique_ptr<StepMemory> memory_of_crossing(const Step& step, const Plan& plan);

// The messages that one rank sends and receives in one round, in the order of the group's members.
struct Loads {
  RunOfMessages sent;
  RunOfMessages received;
};

// The loads without and with the rank's own part. An Extent has the size and place of a message
// (exchange/mesh_exchange.h).
struct BothLoads {
  Loads without;
  Loads with;

  void add_peer(const Extent& sent, const Extent& received) {
    add(without, sent, received);
    add(with, sent, received);
  }
  void add_own(const Extent& own) { add(with, own, own); }

  // The number of elements that all peers and the rank itself add in total.
  struct Totals {
    int64_t sent = 0;
    int64_t received = 0;
    int64_t own = 0;
  };
  // Returns true if no further peer can change which loads are runs.
  bool are_known(const Totals& totals) const {
    const auto is_known = [](const RunOfMessages& load, int64_t total) {
      return !load.is_run() || load.total() == total;
    };
    return is_known(without.sent, totals.sent) && is_known(without.received, totals.received) &&
           is_known(with.sent, totals.sent + totals.own) && is_known(with.received, totals.received + totals.own);
  }
  void set_totals(const Totals& totals) {
    without.sent.set_total(totals.sent);
    without.received.set_total(totals.received);
    with.sent.set_total(totals.sent + totals.own);
    with.received.set_total(totals.received + totals.own);
  }

 private:
  static void add(Loads& loads, const Extent& sent, const Extent& received) {
    loads.sent.add(sent.count, sent.first_held, sent.is_contiguous_held);
    loads.received.add(received.count, received.first_needed, received.is_contiguous_needed);
  }
};

// The numbers of elements that a rank packs and unpacks in one round, and of messages that need no packing because they
// are one run in the tensor.
struct Packed {
  int64_t sent = 0;           // elements
  int64_t received = 0;       // elements
  int64_t sent_runs = 0;      // messages
  int64_t received_runs = 0;  // messages

  void add_sent(const Extent& load, int64_t times) {
    if (!load.is_contiguous_held) sent += load.count * times;
    if (load.is_contiguous_held && load.count > 0) sent_runs += times;
  }
  void add_received(const Extent& load, int64_t times) {
    if (!load.is_contiguous_needed) received += load.count * times;
    if (load.is_contiguous_needed && load.count > 0) received_runs += times;
  }
};

// Emit one round as `exchange` in transfers.h lowers it, as an all-to-all or as messages. `own` is the number of
// elements that stay on the rank; the first round copies them.
void write_all_to_all(Sketch& sketch, const BothLoads& loads, int64_t own, int64_t round, int64_t rounds, int current,
                      int next);
void write_messages(Sketch& sketch, const Packed& packed, int64_t own, int64_t round, int current, int next);

}  // namespace shardwright
