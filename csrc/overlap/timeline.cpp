#include "overlap/timeline.h"

#include <algorithm>
#include <array>

#include "planner/cost.h"

namespace shardwright {
namespace {

// Beyond these, a ring's messages are too many to be worth it, and to be looked at.
constexpr int64_t kMaxRingPartners = 64;

class Clock {
 public:
  Clock(const Program& program, const Plan& plan, const GemmModel& model)
      : program_(program), plan_(plan), model_(model), ends_(program.instructions.size(), 0) {}

  Timeline run() {
    for (size_t i = 0; i < program_.instructions.size(); ++i) {
      const Operation& operation = program_.instructions[i].operation;
      if (const auto* wait = std::get_if<Wait>(&operation)) {
        compute_ = std::max(compute_, ends_[wait->ticket]);
      } else if (is_communication(operation)) {
        const int64_t start = std::max(communication_, compute_);
        const int64_t takes = transfer_ps(operation);
        communication_ = ends_[i] = saturating_sum(start, takes);
        timeline_.communication_ps = saturating_sum(timeline_.communication_ps, takes);
        timeline_.spans.push_back({true, static_cast<int>(i), start, communication_});
      } else {
        const int64_t start = compute_;
        compute_ = saturating_sum(start, compute_ps(operation));
        timeline_.spans.push_back({false, static_cast<int>(i), start, compute_});
      }
    }
    timeline_.total_ps = std::max(compute_, communication_);
    return std::move(timeline_);
  }

 private:
  int64_t bytes(int buffer, int64_t count) const { return count * program_.dtype_of(buffer).size_bytes(); }
  int64_t bytes(const BufferRange& range) const { return bytes(range.buffer, range.count); }

  int64_t transfer_ps(const Operation& operation) const {
    const Group& group = program_.groups[group_of(operation)];
    const auto others = static_cast<int64_t>(group.ranks.size()) - 1;
    const Link link = plan_.topology.link(plan_.src.mesh(), group.mesh_dims);
    int64_t messages = others;
    int64_t in = 0;
    int64_t out = 0;
    if (const auto* o = std::get_if<AllGather>(&operation)) {
      in = out = others * bytes(o->src);
    } else if (const auto* o = std::get_if<ReduceScatter>(&operation)) {
      in = out = others * bytes(o->dst);
    } else if (const auto* o = std::get_if<AllReduce>(&operation)) {
      in = out = 2 * bytes(o->data) * others / (others + 1);
      messages *= 2;
    } else if (const auto* o = std::get_if<AllToAll>(&operation)) {
      for (size_t m = 0; m < group.ranks.size(); ++m) {
        if (static_cast<int64_t>(m) == group.index) continue;
        in += bytes(o->dst.buffer, o->receive_counts[m]);
        out += bytes(o->src.buffer, o->send_counts[m]);
      }
    } else {
      const auto& move = std::get<SendReceive>(operation);
      messages = static_cast<int64_t>(std::max(move.receives.size(), move.sends.size()));
      for (const auto& m : move.receives) in += bytes(m.range);
      for (const auto& m : move.sends) out += bytes(m.range);
    }
    const int64_t latency = saturating_sum(plan_.topology.step_ps, saturating_product(messages, link.message_ps));
    return saturating_sum(latency, scaled(std::max(in, out), link.ps_per_kib));
  }

  int64_t compute_ps(const Operation& operation) {
    if (const auto* gemm = std::get_if<Gemm>(&operation)) {
      const int64_t takes =
          model_.picoseconds(gemm->m, gemm->n, gemm->k, gemm->count, program_.dtype_of(gemm->lhs.buffer).size_bytes());
      timeline_.gemm_ps = saturating_sum(timeline_.gemm_ps, takes);
      const int64_t beside = std::clamp<int64_t>(communication_ - compute_, 0, takes);
      return saturating_sum(takes, saturating_product(beside, model_.contention_percent) / 100);
    }
    int64_t touched = 0;
    if (const auto* o = std::get_if<Copy>(&operation)) {
      for (const Box& box : o->boxes) {
        int64_t count = 1;
        for (const int64_t size : box.sizes) count *= size;
        touched += bytes(o->src, count);
      }
    } else if (const auto* o = std::get_if<Reduce>(&operation)) {
      touched = bytes(o->dst) * static_cast<int64_t>(o->parts.size());
    } else {
      for (const int buffer : buffers_of(operation)) touched = std::max(touched, program_.size_bytes(buffer));
    }
    return scaled(touched, plan_.topology.memory_ps_per_kib);
  }

  const Program& program_;
  const Plan& plan_;
  const GemmModel& model_;
  std::vector<int64_t> ends_;  // of transfers, by instruction
  int64_t compute_ = 0;
  int64_t communication_ = 0;
  Timeline timeline_;
};

}  // namespace

Timeline predict(const Program& program, const Plan& plan, const GemmModel& model) {
  return Clock(program, plan, model).run();
}

Timeline predict(const Matmul& matmul, const Schedule& schedule, const GemmModel& model) {
  return predict(compile(matmul, schedule, 0), plan_of(matmul), model);
}

std::vector<Prediction> predictions(const Matmul& matmul, const GemmModel& model) {
  std::vector<Schedule> schedules{{Method::kSerial, 1}};
  if (!why_only_serial(matmul)) {
    const int64_t k = num_partners(matmul);
    std::vector<int64_t> counts{1, 2, 4, k, 2 * k};
    std::sort(counts.begin(), counts.end());
    counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
    for (const Method method : {Method::kCollective, Method::kRing}) {
      for (const int64_t chunks : counts) {
        const bool is_ring = method == Method::kRing;
        if (chunks > kMaxChunks || (is_ring && (!has_ring(matmul) || k > kMaxRingPartners || chunks == 1))) continue;
        schedules.push_back({method, chunks});
      }
    }
  }
  std::vector<Prediction> all;
  for (const Schedule& schedule : schedules) all.push_back({schedule, predict(matmul, schedule, model).total_ps});
  return all;
}

Schedule choose(const Matmul& matmul, const GemmModel& model) {
  const std::vector<Prediction> all = predictions(matmul, model);
  const auto best = std::min_element(all.begin(), all.end(),
                                     [](const Prediction& a, const Prediction& b) { return a.total_ps < b.total_ps; });
  const int64_t serial = all.front().total_ps;
  return serial - best->total_ps >= serial / 100 * kLeastGainPercent ? best->schedule : all.front().schedule;
}

}  // namespace shardwright
