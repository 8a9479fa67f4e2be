#include "products/timeline.h"

#include <algorithm>

#include "cost/cost.h"
#include "products/compile.h"
#include "program/order.h"
#include "program/transfer_traffic.h"
#include "support/ceil_divide.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr int64_t kMaxRingPartners = 64;  // rings of more partners are not tried: their many messages take too long
constexpr int64_t kUsualChunks = 8;       // numbers of chunks up to this one are always tried
// Attention's backward has five products of matrices; its forward has two.
constexpr double kBackwardProducts = 2.5;

// Returns, for each instruction, the last earlier instruction that computes or waits, or -1. A host finishes that
// instruction before it reaches the later one.
std::vector<int> host_predecessors(const Program& program) {
  std::vector<int> predecessors;
  int last = -1;
  for (size_t i = 0; i < program.instructions.size(); ++i) {
    predecessors.push_back(last);
    if (!is_communication(program.instructions[i].operation)) last = static_cast<int>(i);
  }
  return predecessors;
}

// Predicts one program. Instructions are placed one by one on their lanes. compute_end_ and communication_end_ are the
// ends of the instructions placed so far. The instruction placed next is the next one of either lane, whichever starts
// earlier.
class Clock {
 public:
  Clock(const Program& program, const Topology& topology, const Mesh& mesh, const GemmModel& model)
      : program_(program),
        topology_(topology),
        mesh_(mesh),
        model_(model),
        is_host_(model.num_processors == 1),
        model_with_transfers_(model.with_fewer_processors(program.sms_left)),
        predecessors_(is_host_ ? host_predecessors(program) : order_of_transfers(program)),
        leaves_processors_(program.instructions.size(), false),
        ends_(program.instructions.size(), 0) {
    int num_in_flight = 0;
    for (int i = 0; i < static_cast<int>(program.instructions.size()); ++i) {
      const Operation& operation = program.instructions[i].operation;
      leaves_processors_[i] = !is_host_ && program.sms_left > 0 && num_in_flight > 0;
      (is_communication(operation) ? transfers_ : compute_steps_).push_back(i);
      num_in_flight += match(
          operation, [](const IsTransfer auto&) { return 1; }, [](const IsCompute auto&) { return 0; },
          [](const Wait&) { return -1; });
    }
  }

  // Places all instructions by ascending start. So all instructions that still run when an instruction starts are
  // already placed.
  Timeline run() {
    size_t step = 0;
    size_t transfer = 0;
    while (step < compute_steps_.size() || transfer < transfers_.size()) {
      const bool is_transfer =
          step == compute_steps_.size() ||
          (transfer < transfers_.size() && is_transfer_next(transfers_[transfer], compute_steps_[step]));
      is_transfer ? schedule_transfer(transfers_[transfer++]) : schedule_compute(compute_steps_[step++]);
    }
    timeline_.total_ps = std::max(compute_end_, communication_end_);
    return std::move(timeline_);
  }

 private:
  // A product on a device. Transfers that become ready while it runs wait for its end or for its next wave. Times are
  // in picoseconds.
  struct Product {
    int64_t start = 0;
    int64_t end = 0;
    int64_t wave_ps = 1;
    bool leaves_processors = false;
  };

  // Returns true if `transfer`, the next instruction of the communication lane, is placed before `step`, the next
  // instruction of the compute lane.
  bool is_transfer_next(int transfer, int step) const {
    if (predecessors_[transfer] >= step) return false;
    const Operation& operation = program_.instructions[step].operation;
    if (const auto* wait = std::get_if<Wait>(&operation)) return wait->ticket >= transfer;
    if (is_host_) return true;
    const auto* gemm = std::get_if<Gemm>(&operation);
    if (gemm == nullptr) return false;
    if (gemm->flags) return gemm->flags->fetch >= transfer;
    const int64_t ready = ready_at(transfer);
    if (model_.transfer_processors == 0) return ready <= compute_end_;
    const bool is_released_by_compute = predecessors_[transfer] >= 0 && ends_[predecessors_[transfer]] == ready;
    return ready < compute_end_ || (ready == compute_end_ && !is_released_by_compute);
  }

  // Returns the time at which the next transfer is ready.
  int64_t ready_at(int transfer) const {
    const int predecessor = predecessors_[transfer];
    return std::max(communication_end_, predecessor < 0 ? 0 : ends_[predecessor]);
  }

  // Places the next transfer. If it needs processors of a device while a product runs, it waits for the product's end
  // or next wave, and may take longer (timeline.h).
  void schedule_transfer(int index) {
    const Operation& operation = program_.instructions[index].operation;
    int64_t start = ready_at(index);
    const int64_t full_speed_ps = transfer_ps(operation, 1, 1);
    const bool is_chunk = program_.instructions[index].chunk >= 0;
    int64_t duration = saturating_sum(full_speed_ps, is_host_ && is_chunk ? model_.chunk_ps : 0);
    const int64_t needs = model_.transfer_processors;
    if (needs == 0) {
      const bool is_queued = start == communication_end_ && index != transfers_.front();
      if (!is_host_ && is_queued) duration -= topology_.step_ps;
    } else if (start < last_product_.end && !last_product_.leaves_processors) {
      start = last_product_.end;
    } else if (start < last_product_.end) {
      const int64_t waves = std::max<int64_t>(ceil_divide(start - last_product_.start, last_product_.wave_ps), 1);
      start = std::min(last_product_.end, saturating_sum(last_product_.start, waves * last_product_.wave_ps));
      const int64_t available = std::min(program_.sms_left, needs);
      if (start < last_product_.end) duration = transfer_ps(operation, needs, available);
    }
    if (std::holds_alternative<Fetch>(operation)) fetch_begin_ = start;
    communication_end_ = ends_[index] = saturating_sum(start, duration);
    timeline_.communication_ps = saturating_sum(timeline_.communication_ps, full_speed_ps);
    timeline_.spans.push_back({true, index, start, communication_end_});
  }

  // Places the next instruction of the compute lane.
  void schedule_compute(int index) {
    const int64_t start = compute_end_;
    const auto place = [&](int64_t duration) {
      compute_end_ = saturating_sum(start, duration);
      timeline_.spans.push_back({false, index, start, compute_end_});
    };
    match(
        program_.instructions[index].operation,
        [&](const Wait& o) { compute_end_ = std::max(compute_end_, ends_[o.ticket]); },
        [&](const Gemm& o) { place(gemm_ps(o, index)); }, [&](const Attend& o) { place(slowed(attend_ps(o, 1))); },
        [&](const AttendBackward& o) { place(slowed(attend_ps(o, kBackwardProducts))); },
        [&](const IsCompute auto& o) { place(picoseconds_for(memory_bytes(o), topology_.memory_ps_per_kib)); },
        [](const IsTransfer auto&) { check_invariant(false, "a transfer was placed in the compute lane"); });
    ends_[index] = compute_end_;
  }

  int64_t bytes(BufferId buffer, int64_t count) const { return count * program_.dtype_of(buffer).size_bytes(); }
  int64_t bytes(const BufferRange& range) const { return bytes(range.buffer, range.count); }

  // Returns the time of a transfer whose bytes take `num` / `den` times as long as at full speed.
  int64_t transfer_ps(const Operation& operation, int64_t num, int64_t den) const {
    const TransferTraffic traffic = traffic_of(program_, operation);
    const Link link = link_of(operation, traffic);
    const int64_t messages = std::max(traffic.received_messages, traffic.sent_messages);
    const int64_t bytes = std::max(traffic.received_bytes, traffic.sent_bytes);
    const int64_t latency = saturating_sum(topology_.step_ps, saturating_product(messages, link.message_ps));
    return saturating_sum(latency, saturating_product(picoseconds_for(bytes, link.ps_per_kib), num) / den);
  }

  // Returns the slowest link of the transfer's group. If the group spans nodes, some of its messages may stay within a
  // node and not take the link between nodes, which the node's ranks share. Then the costs of messages are the means of
  // both links' costs, weighted by the messages and bytes on each.
  Link link_of(const Operation& operation, const TransferTraffic& traffic) const {
    const MeshDimSet mesh_dims = program_.groups[group_of(operation).value()].mesh_dims;
    Link link = topology_.slowest_link(mesh_, mesh_dims);
    const auto* messages = std::get_if<SendReceive>(&operation);
    if (messages == nullptr || traffic.bytes() == 0 || !topology_.is_between_nodes(mesh_, mesh_dims)) return link;
    const TransferTraffic on_node = traffic_inside_node(program_, *messages, topology_.ranks_per_node);
    const auto mean = [](int64_t group_cost, int64_t node_cost, int64_t on_node_amount, int64_t amount) {
      return group_cost + (node_cost - group_cost) * (on_node_amount * 1024 / amount) / 1024;
    };
    link.message_ps = mean(link.message_ps, topology_.inside.message_ps, on_node.messages(), traffic.messages());
    link.ps_per_kib = mean(link.ps_per_kib, topology_.inside.ps_per_kib, on_node.bytes(), traffic.bytes());
    return link;
  }

  // Returns the time of the product, which is placed at the end of the compute lane. On devices, records it as the last
  // product.
  int64_t gemm_ps(const Gemm& gemm, int index) {
    const int64_t item_bytes = program_.dtype_of(gemm.lhs.buffer).size_bytes();
    const int64_t alone_ps = model_.picoseconds(gemm.m, gemm.n, gemm.k, gemm.count, item_bytes);
    timeline_.gemm_ps = saturating_sum(timeline_.gemm_ps, alone_ps);
    if (gemm.flags) return flagged_ps(*gemm.flags, alone_ps);
    const bool leaves_processors = leaves_processors_[index];
    const int64_t duration = leaves_processors
                                 ? model_with_transfers_.picoseconds(gemm.m, gemm.n, gemm.k, gemm.count, item_bytes)
                                 : slowed(alone_ps);
    if (!is_host_) {
      const GemmModel& model = leaves_processors ? model_with_transfers_ : model_;
      const int64_t wave_ps = std::max<int64_t>(duration / model.waves(gemm.m, gemm.n, gemm.count), 1);
      last_product_ = {compute_end_, saturating_sum(compute_end_, duration), wave_ps, leaves_processors};
    }
    return duration;
  }

  // Returns the time of a product that waits for flags and would take `alone_ps` without waiting. The chunks of other
  // ranks are received one after the other from the start of the fetch on. The product multiplies each chunk once it is
  // received, beginning with the chunks of this rank's own part.
  int64_t flagged_ps(const Flags& flags, int64_t alone_ps) const {
    const auto& fetch = std::get<Fetch>(program_.instructions[flags.fetch].operation);
    const int64_t begin = fetch_begin_;
    const int64_t chunks = flags.range.count;
    const int64_t own = chunks / static_cast<int64_t>(program_.groups[fetch.group].ranks.size());
    int64_t end = compute_end_;
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t received = c < own ? 0 : begin + (ends_[flags.fetch] - begin) / (chunks - own) * (c - own + 1);
      end = saturating_sum(std::max(end, received), alone_ps / chunks);
    }
    return std::max(end - compute_end_, alone_ps);
  }

  // Returns the time of compute that runs during transfers and would take `alone_ps` without them.
  int64_t slowed(int64_t alone_ps) const {
    const int64_t overlapped = std::clamp<int64_t>(communication_end_ - compute_end_, 0, alone_ps);
    return saturating_sum(alone_ps, saturating_product(overlapped, model_.contention_percent) / 100);
  }

  // Returns the time of two matrix products for each head, scaled by the share of visible pairs and by `multiple` (a
  // backward has more products). `AttendOperation` is Attend or AttendBackward.
  template <typename AttendOperation>
  int64_t attend_ps(const AttendOperation& o, double multiple) {
    const AttendSizes& s = o.sizes;
    const int64_t item_bytes = program_.dtype_of(o.q.buffer).size_bytes();
    const std::optional<VisiblePart> part = visible_part(o.band, s.rows, s.columns);
    if (!part) return 0;
    const int64_t count = s.batch * s.heads;
    const int64_t dense_ps =
        saturating_sum(model_.picoseconds(part->rows, part->columns, s.depth, count, item_bytes),
                       model_.picoseconds(part->rows, s.value_depth, part->columns, count, item_bytes));
    const double share = static_cast<double>(visible_pairs(o.band, s.rows, s.columns)) /
                         (static_cast<double>(part->rows) * static_cast<double>(part->columns));
    const auto alone_ps = static_cast<int64_t>(static_cast<double>(dense_ps) * share * multiple);
    timeline_.gemm_ps = saturating_sum(timeline_.gemm_ps, alone_ps);
    return alone_ps;
  }

  // Return the bytes of memory traffic that determine the time of an instruction: the bytes that it reads or the
  // bytes that it writes, whichever are more.
  int64_t memory_bytes(const Copy& copy) const {
    int64_t copied = 0;
    for (const Box& box : copy.boxes) {
      int64_t count = 1;
      for (const int64_t size : box.sizes) count *= size;
      copied += bytes(copy.src, count);
    }
    return copied;
  }
  int64_t memory_bytes(const Reduce& reduce) const {
    return bytes(reduce.dst) * static_cast<int64_t>(reduce.parts.size());
  }
  int64_t memory_bytes(const FillZero& fill) const { return bytes(fill.dst); }
  int64_t memory_bytes(const Divide& divide) const { return bytes(divide.dst); }
  int64_t memory_bytes(const Power& power) const { return std::max(bytes(power.src), bytes(power.dst)); }
  int64_t memory_bytes(const Cast& cast) const { return std::max(bytes(cast.src), bytes(cast.dst)); }

  int64_t memory_bytes(const Merge& merge) const {
    return 2 * bytes(merge.left.out.buffer, elements(merge.sizes, merge.sizes.value_depth));
  }
  int64_t memory_bytes(const Accumulate& sum) const {
    return 2 * bytes(sum.dst.buffer, elements(sum.sizes, sum.sizes.depth));
  }

  static int64_t elements(const AttendSizes& s, int64_t depth) { return s.batch * s.heads * s.rows * depth; }

  const Program& program_;
  const Topology& topology_;
  const Mesh& mesh_;
  const GemmModel& model_;
  const bool is_host_;
  const GemmModel model_with_transfers_;  // without the processors left to transfers
  const std::vector<int> predecessors_;   // by instruction: the instruction that a transfer must come after, or -1
  std::vector<int> transfers_;            // the communication lane: indices of instructions
  std::vector<int> compute_steps_;        // the compute lane, with its Waits: indices of instructions
  std::vector<bool> leaves_processors_;   // by instruction: true if transfers are in flight when a product starts
  std::vector<int64_t> ends_;             // by instruction, once it is placed; in picoseconds, like all times here
  int64_t compute_end_ = 0;
  int64_t communication_end_ = 0;
  int64_t fetch_begin_ = 0;  // start of the last Fetch
  Product last_product_;
  Timeline timeline_;
};

}  // namespace

Timeline predict(const Program& program, const Plan& plan, const GemmModel& model) {
  return predict(program, plan.topology, plan.src.mesh(), model);
}

Timeline predict(const Program& program, const Topology& topology, const Mesh& mesh, const GemmModel& model) {
  return Clock(program, topology, mesh, model).run();
}

namespace {

// Returns the first rank of the mesh, which has at least as much to do as any other.
Rank first_rank(const Matmul& matmul) { return plan_of(matmul).src.mesh().rank_at(Position{0}); }

}  // namespace

Timeline predict(const Matmul& matmul, const Schedule& schedule, const GemmModel& model) {
  return predict(compile(matmul, schedule, first_rank(matmul)), plan_of(matmul), model);
}

namespace {

// Returns the peak memory of the first rank's program.
int64_t peak_bytes(const Matmul& matmul, const Schedule& schedule) {
  return compile(matmul, schedule, first_rank(matmul)).peak_bytes();
}

// Returns the numbers of processors that products may leave to transfers.
std::vector<int64_t> processors_to_leave(const GemmModel& model) {
  std::vector<int64_t> left{0};
  for (const int64_t processors : {model.transfer_processors / 2, model.transfer_processors}) {
    if (processors > 0 && 2 * processors < model.num_processors) left.push_back(processors);
  }
  return left;
}

// Returns `schedule` with the depth and the processors left to transfers that are predicted to be fastest. Depths above
// kUsualDepth may need at most `limit_bytes`, or what depth 1 needs if that is more.
Prediction tuned_prediction(const Matmul& matmul, Schedule schedule, const GemmModel& model,
                            std::optional<int64_t> depth, int64_t limit_bytes) {
  std::vector<int64_t> depths{1, kUsualDepth, schedule.chunks};
  const bool is_host = model.num_processors == 1;
  if (is_host && schedule.method == Method::kRing && num_partners(matmul) > 2) depths = {1};
  if (depth) depths = {*depth};
  std::optional<Prediction> best;
  int64_t bound_ps = 0;  // no depth can take less time
  for (const int64_t d : depths) {
    const auto can_save = [&] { return best->total_ps - bound_ps > best->total_ps / 100 * kLeastTuningPercent; };
    if (best && (d > schedule.chunks || d <= best->schedule.depth || !can_save())) continue;
    schedule.depth = d;
    Program program = compile(matmul, schedule, first_rank(matmul));
    if (d == 1) limit_bytes = std::max(limit_bytes, program.peak_bytes());
    if (best && d > kUsualDepth && program.peak_bytes() > limit_bytes) break;
    for (const int64_t left : processors_to_leave(model)) {
      if (best && !can_save()) break;
      schedule.sms_left = program.sms_left = left;
      const Timeline timeline = predict(program, plan_of(matmul), model);
      bound_ps = std::max(timeline.communication_ps, timeline.gemm_ps);
      const bool saves_enough = best && best->total_ps - timeline.total_ps > best->total_ps / 100 * kLeastTuningPercent;
      if (!best || saves_enough) best = Prediction{schedule, timeline.total_ps};
    }
  }
  return *best;
}

}  // namespace

std::vector<Prediction> predictions(const Matmul& matmul, const GemmModel& model, std::optional<int64_t> depth) {
  const Schedule serial;
  std::vector<Prediction> all{{serial, predict(matmul, serial, model).total_ps}};
  if (why_only_serial(matmul)) return all;
  const int64_t limit_bytes = peak_bytes(matmul, serial);
  const int64_t k = num_partners(matmul);
  std::vector<int64_t> counts{1, 2, 4, 8, 16, 32, k, 2 * k};
  const auto is_usual = [&](int64_t chunks) { return chunks <= kUsualChunks || chunks == k || chunks == 2 * k; };
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  for (const Method method : {Method::kCollective, Method::kRing}) {
    std::optional<int64_t> best;
    bool is_last_best = true;  // of this method, so far
    for (const int64_t chunks : counts) {
      const bool is_ring = method == Method::kRing;
      if (chunks > kMaxChunks || (is_ring && (!has_ring(matmul) || k > kMaxRingPartners || chunks == 1))) continue;
      if (!is_usual(chunks) && !is_last_best) continue;
      all.push_back(tuned_prediction(matmul, {method, chunks}, model, depth, limit_bytes));
      is_last_best = !best || all.back().total_ps < *best;
      if (is_last_best) best = all.back().total_ps;
    }
  }
  return all;
}

Schedule tuned_schedule(const Matmul& matmul, const Schedule& schedule, const GemmModel& model,
                        std::optional<int64_t> depth) {
  const bool has_depth = schedule.method == Method::kRing || schedule.method == Method::kCollective;
  if (!has_depth) return schedule;
  return tuned_prediction(matmul, schedule, model, depth, peak_bytes(matmul, {})).schedule;
}

Schedule choose_fastest(const Matmul& matmul, const GemmModel& model, std::optional<int64_t> depth) {
  const std::vector<Prediction> all = predictions(matmul, model, depth);
  const auto best = std::min_element(all.begin(), all.end(),
                                     [](const Prediction& a, const Prediction& b) { return a.total_ps < b.total_ps; });
  const int64_t serial = all.front().total_ps;
  return serial - best->total_ps >= serial / 100 * kLeastGainPercent ? best->schedule : all.front().schedule;
}

}  // namespace shardwright
