#include "program/memory.h"

#include <algorithm>
#include <initializer_list>
#include <map>
#include <optional>

#include "program/builder.h"
#include "program/pairs.h"

namespace shardwright {

namespace {

constexpr int kNoBuffer = -1;

// A program as far as memory is concerned: the sizes of its buffers, and which of them each instruction names.
class Sketch {
 public:
  Sketch() : buffers_(1) {}  // the input, which belongs to the caller

  void begin_step() { ++num_steps_; }

  int new_buffer(int64_t count) {
    buffers_.push_back({count});
    return static_cast<int>(buffers_.size()) - 1;
  }
  int64_t count_of(int buffer) const { return buffers_[buffer].count; }

  void emit(std::initializer_list<int> named) {
    for (const int buffer : named) {
      if (buffer == kNoBuffer) continue;
      if (buffers_[buffer].first < 0) buffers_[buffer].first = static_cast<int>(steps_.size());
      buffers_[buffer].last = static_cast<int>(steps_.size());
    }
    steps_.push_back(num_steps_ - 1);
  }

  // Elements, by step. `output` lives to the end.
  std::vector<int64_t> peaks(int output) const {
    std::vector<int64_t> changes(steps_.size() + 1, 0);
    for (size_t b = 1; b < buffers_.size(); ++b) {
      const Buffer& buffer = buffers_[b];
      if (buffer.first < 0) continue;
      changes[buffer.first] += buffer.count;
      if (static_cast<int>(b) != output) changes[buffer.last + 1] -= buffer.count;
    }
    std::vector<int64_t> peaks(num_steps_, 0);
    int64_t live = 0;
    for (size_t i = 0; i < steps_.size(); ++i) {
      live += changes[i];
      peaks[steps_[i]] = std::max(peaks[steps_[i]], live);
    }
    return peaks;
  }

 private:
  struct Buffer {
    int64_t count = 0;
    int first = -1;  // instructions that name it
    int last = -1;
  };
  std::vector<Buffer> buffers_;
  std::vector<int> steps_;  // by instruction
  int num_steps_ = 0;
};

// As first_of_run in builder.h: whether loads lie one behind the other.
class RunOfLoads {
 public:
  void add(int64_t count, int64_t first, bool is_run) {
    if (count == 0) return;
    is_run_ = is_run_ && is_run && (next_ < 0 || first == next_);
    next_ = first + count;
    total_ += count;
  }
  bool is_run() const { return is_run_; }
  int64_t total() const { return total_; }

 private:
  bool is_run_ = true;
  int64_t next_ = -1;
  int64_t total_ = 0;
};

// What one rank sends and receives in one round, by member of the group.
struct Loads {
  RunOfLoads sent;
  RunOfLoads received;
};

}  // namespace

// One step's part of the programs of all ranks. The instructions are those of data_moves.cpp and reductions.cpp, as far
// as they name buffers.
class StepMemory {
 public:
  StepMemory(const Step& step, const Plan& plan)
      : step_(step),
        backend_(plan.backend),
        named_groups_only_(plan.named_groups_only),
        is_native_(reduces_natively(step, plan.backend)),
        pairs_(step),
        traffic_(step) {}

  void write(Sketch& sketch, int64_t position, int current, int next) {
    switch (step_.op) {
      case StepOp::kZeroFill:
        if (sketch.count_of(next) > 0) sketch.emit({next});
        [[fallthrough]];
      case StepOp::kSlice:
      case StepOp::kPartition:
        return copy_own(sketch, shared_elements(step_.before.region(position), step_.after.region(position)), current,
                        next);
      case StepOp::kAllGather:
      case StepOp::kAllToAll:
      case StepOp::kPermute:
      case StepOp::kExchange:
        return data_move(sketch, position, current, next);
      case StepOp::kReduceScatter:
        return reduce_scatter(sketch, position, current, next);
      case StepOp::kAllReduce:
        return all_reduce(sketch, position, current, next);
    }
  }

 private:
  using Group = StepPairs::Group;
  using Transfer = StepPairs::Transfer;

  static void copy_own(Sketch& sketch, int64_t own, int current, int next) {
    if (own > 0) sketch.emit({current, next});
  }

  void data_move(Sketch& sketch, int64_t position, int current, int next) {
    Group& group = pairs_.group(position);
    const size_t me = StepPairs::index_of(group, position);
    const DataMovePlan plan = way_of(pairs_, group, me, backend_, named_groups_only_);
    switch (plan.way) {
      case DataMoveWay::kNativeGather:
        return native_all_gather(sketch, group, me, current, next);
      case DataMoveWay::kAllToAll:
        return all_to_all(sketch, group, me, plan.partners, current, next);
      case DataMoveWay::kMessages:
        return messages(sketch, group, me, position, current, next);
      case DataMoveWay::kLocal:
        return copy_own(sketch, pairs_.own(group, me).count, current, next);
    }
  }

  void native_all_gather(Sketch& sketch, const Group& group, size_t me, int current, int next) {
    const auto [found, is_new] = gathers_in_place_.try_emplace(group.positions[0], true);
    const int64_t n = pairs_.num_held(group, me);
    const size_t k = group.positions.size();
    if (is_new) {
      for (size_t m = 0; m < k && found->second; ++m) {
        const Load load = pairs_.share(group, m, me).in_round(0);
        found->second = load.is_run_needed && load.first_needed == static_cast<int64_t>(m) * n;
      }
    }
    if (found->second) {
      sketch.emit({current, next});
      return sketch.emit({current, next});
    }
    const int staging = sketch.new_buffer(n * static_cast<int64_t>(k));
    sketch.emit({current, staging});
    copy_own(sketch, pairs_.own(group, me).count, current, next);
    sketch.emit({current, staging});
    if (k > 1) sketch.emit({staging, next});
  }

  void all_to_all(Sketch& sketch, const Group& group, size_t me, const std::vector<size_t>& partners, int current,
                  int next) {
    const size_t k = partners.empty() ? group.positions.size() : partners.size();
    const auto member = [&](size_t m) { return partners.empty() ? m : partners[m]; };
    const Load own = pairs_.own(group, me);
    const bool is_gather = step_.op == StepOp::kAllGather;  // then all members need the same
    const auto [gathered, is_new] = gathered_.try_emplace(is_gather ? group.positions[0] : -1);
    std::vector<Transfer>& receives = gathered->second;
    if (!is_gather || is_new) {
      receives.clear();
      for (size_t m = 0; m < k; ++m) receives.push_back(pairs_.transfer(group, member(m), me));
    }
    std::vector<Transfer> sends;
    for (size_t m = 0; m < (is_gather ? 1 : k); ++m) sends.push_back(pairs_.transfer(group, me, member(m)));
    for (int64_t round = 0; round < step_.rounds; ++round) {
      Loads without;
      Loads with;
      for (size_t m = 0; m < k; ++m) {
        if (member(m) == me) {
          with.sent.add(own.count, own.first_held, own.is_run_held);
          with.received.add(own.count, own.first_needed, own.is_run_needed);
          continue;
        }
        const Load sent = sends[is_gather ? 0 : m].in_round(round);
        const Load received = receives[m].in_round(round);
        for (Loads* loads : {&without, &with}) {
          loads->sent.add(sent.count, sent.first_held, sent.is_run_held);
          loads->received.add(received.count, received.first_needed, received.is_run_needed);
        }
      }
      const auto packed = [](const Loads& loads) {
        return (loads.sent.is_run() ? 0 : loads.sent.total()) + (loads.received.is_run() ? 0 : loads.received.total());
      };
      const bool carries_own = step_.rounds == 1 && packed(with) < packed(without) + own.count;
      const Loads& loads = carries_own ? with : without;
      const int from = loads.sent.is_run() ? current : sketch.new_buffer(loads.sent.total());
      const int to = loads.received.is_run() ? next : sketch.new_buffer(loads.received.total());
      if (from != current) sketch.emit({current, from});
      sketch.emit({from, to});
      if (!carries_own && round == 0) copy_own(sketch, own.count, current, next);
      sketch.emit({from, to});
      if (to != next) sketch.emit({to, next});
    }
  }

  // Elements packed by a rank in one round, and messages that need no packing.
  struct Packed {
    int64_t sent = 0;
    int64_t received = 0;
    int64_t sent_runs = 0;
    int64_t received_runs = 0;

    void add_sent(const Load& load, int64_t times) {
      if (!load.is_run_held) sent += load.count * times;
      if (load.is_run_held && load.count > 0) sent_runs += times;
    }
    void add_received(const Load& load, int64_t times) {
      if (!load.is_run_needed) received += load.count * times;
      if (load.is_run_needed && load.count > 0) received_runs += times;
    }
  };

  void messages(Sketch& sketch, Group& group, size_t me, int64_t position, int current, int next) {
    std::vector<Packed> rounds(step_.rounds);
    if (pairs_.all_look_alike()) {
      add_equal_shares(rounds, group, me, position);
    } else {
      for (const auto& [transfer, times] : pairs_.sends(group, me)) {
        for (int64_t round = 0; round < step_.rounds; ++round) rounds[round].add_sent(transfer.in_round(round), times);
      }
      for (const auto& [transfer, times] : pairs_.receives(group, me)) {
        for (int64_t round = 0; round < step_.rounds; ++round) {
          rounds[round].add_received(transfer.in_round(round), times);
        }
      }
    }
    const int64_t own = pairs_.own(group, me).count;
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Packed& packed = rounds[round];
      const int sending = packed.sent > 0 ? sketch.new_buffer(packed.sent) : kNoBuffer;
      const int receiving = packed.received > 0 ? sketch.new_buffer(packed.received) : kNoBuffer;
      const int sent = packed.sent_runs > 0 ? current : kNoBuffer;
      const int received = packed.received_runs > 0 ? next : kNoBuffer;
      if (sending != kNoBuffer) sketch.emit({current, sending});
      sketch.emit({sent, sending, received, receiving});
      if (round == 0) copy_own(sketch, own, current, next);
      sketch.emit({sent, sending, received, receiving});
      if (receiving != kNoBuffer) sketch.emit({receiving, next});
    }
  }

  // Where digits say it all, what goes between two ranks looks alike for all pairs that have something to say.
  void add_equal_shares(std::vector<Packed>& rounds, const Group& group, size_t me, int64_t position) {
    const Traffic traffic = traffic_.at(position);
    if (traffic.received_bytes == 0 && traffic.sent_bytes == 0) return;
    for (size_t m = 0; m < group.positions.size() && !equal_share_; ++m) {
      if (m == me) continue;
      const Transfer sent = pairs_.transfer(group, me, m);
      const Transfer received = pairs_.transfer(group, m, me);
      if (sent.count() > 0) equal_share_ = sent;
      if (received.count() > 0) equal_share_ = received;
    }
    const int64_t share_bytes = equal_share_->count() * step_.before.dtype().size_bytes();
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Load load = equal_share_->in_round(round);
      rounds[round].add_sent(load, traffic.sent_bytes / share_bytes);
      rounds[round].add_received(load, traffic.received_bytes / share_bytes);
    }
  }

  // All members hold the same, so they answer alike how it is sent.
  struct Scattering {
    std::vector<RunOfLoads> rounds;
    std::vector<bool> is_even;
  };

  const Scattering& scattering(const Group& group, size_t me) {
    const auto [found, is_new] = scatterings_.try_emplace(group.positions[0]);
    Scattering& scattering = found->second;
    if (!is_new) return scattering;
    std::vector<Transfer> parts;
    for (size_t m = 0; m < group.positions.size(); ++m) parts.push_back(pairs_.share(group, me, m));
    for (int64_t round = 0; round < step_.rounds; ++round) {
      RunOfLoads loads;
      bool is_even = true;
      const int64_t first = parts[0].in_round(round).count;
      for (const Transfer& part : parts) {
        const Load load = part.in_round(round);
        is_even = is_even && load.count == first;
        loads.add(load.count, load.first_held, load.is_run_held);
      }
      scattering.rounds.push_back(loads);
      scattering.is_even.push_back(is_even);
    }
    return scattering;
  }

  void reduce_scatter(Sketch& sketch, int64_t position, int current, int next) {
    const Group& group = pairs_.group(position);
    const size_t me = StepPairs::index_of(group, position);
    const int64_t held = pairs_.num_held(group, me);
    if (held == 0) return;
    current = raised(sketch, current, held);
    const Scattering& of_group = scattering(group, me);
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const RunOfLoads& sent = of_group.rounds[round];
      if (sent.total() == 0) continue;
      const Interval mine = in_round({0, sketch.count_of(next)}, round, step_.rounds);
      const int64_t own = mine.end - mine.begin;
      int packed = current;
      if (!sent.is_run()) {
        packed = sketch.new_buffer(sent.total());
        sketch.emit({current, packed});
      }
      if (of_group.is_even[round] && is_native_) {
        sketch.emit({packed, next});
        sketch.emit({packed, next});
        continue;
      }
      const int staging = sketch.new_buffer(own * static_cast<int64_t>(group.positions.size()));
      sketch.emit({packed, staging});
      sketch.emit({packed, staging});
      if (own > 0) sketch.emit({next, staging});
    }
  }

  void all_reduce(Sketch& sketch, int64_t position, int current, int next) {
    const int64_t n = sketch.count_of(next);
    if (n == 0) return;
    if (is_native_) return sketch.emit({current, next});
    const Group& group = pairs_.group(position);
    const size_t me = StepPairs::index_of(group, position);
    const auto k = static_cast<int64_t>(group.positions.size());
    for (int64_t round = 0; round < step_.rounds; ++round) {
      const Interval range = in_round({0, n}, round, step_.rounds);
      const int64_t length = range.end - range.begin;
      if (length == 0) continue;
      const int contribution = raised(sketch, current, length);
      if (k == 2) {
        const int staging = sketch.new_buffer(length);
        sketch.emit({contribution, staging});
        sketch.emit({contribution, staging});
        sketch.emit({contribution, staging, next});
        continue;
      }
      const Interval mine = flat_chunk(length, k, static_cast<int64_t>(me));
      const int64_t own = mine.end - mine.begin;
      const int staging = sketch.new_buffer(own * k);
      sketch.emit({contribution, staging});
      sketch.emit({contribution, staging});
      if (own > 0) sketch.emit({next, staging});
      const Interval first = flat_chunk(length, k, 0);
      const bool copies = (first.end - first.begin) * step_.before.dtype().size_bytes() <= kMaxCopiedGatherBytes;
      const int gathered = copies ? sketch.new_buffer(own * k) : kNoBuffer;
      if (copies && own > 0) sketch.emit({next, gathered});
      sketch.emit({gathered, next});
      sketch.emit({gathered, next});
    }
  }

  // The buffer that holds the powers that are added, where a norm is due.
  int raised(Sketch& sketch, int current, int64_t count) const {
    if (reduction_of(step_).power == 1) return current;
    const int raised = sketch.new_buffer(count);
    sketch.emit({current, raised});
    return raised;
  }

  const Step& step_;
  Backend backend_;
  bool named_groups_only_;
  bool is_native_;
  StepPairs pairs_;
  ExchangeTraffic traffic_;
  std::optional<Transfer> equal_share_;
  // By the first position of a group.
  std::map<int64_t, bool> gathers_in_place_;
  std::map<int64_t, std::vector<Transfer>> gathered_;
  std::map<int64_t, Scattering> scatterings_;
};

ProgramMemory::ProgramMemory(const Plan& plan) : plan_(plan) {
  for (const Step& step : plan.steps) steps_.push_back(std::make_unique<StepMemory>(step, plan));
}

ProgramMemory::~ProgramMemory() = default;

std::vector<int64_t> ProgramMemory::peak_bytes_by_step(int64_t position) {
  Sketch sketch;
  int current = kInputBuffer;
  for (size_t i = 0; i < steps_.size(); ++i) {
    sketch.begin_step();
    const int next = sketch.new_buffer(num_elements(plan_.steps[i].after.region(position)));
    steps_[i]->write(sketch, position, current, next);
    current = next;
  }
  std::vector<int64_t> peaks = sketch.peaks(current);
  for (int64_t& peak : peaks) peak *= plan_.src.dtype().size_bytes();
  return peaks;
}

}  // namespace shardwright
