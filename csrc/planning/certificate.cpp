#include "planning/certificate.h"

#include <algorithm>
#include <bit>

#include "cost/cost.h"
#include "exchange/axes.h"
#include "exchange/bounds.h"
#include "exchange/digits.h"
#include "moves/move.h"
#include "moves/step_counts.h"
#include "moves/traffic.h"
#include "search/make_plan.h"
#include "search/search.h"
#include "support/ceil_divide.h"
#include "support/error.h"
#include "support/text.h"

namespace shardwright {
namespace {

// Returns the number of ranks whose data the worst rank needs, itself included: the ranks that hold its elements, times
// the number of contributions to each reduced element. If the cuts have no digits (exchange/digits.h) or the layouts
// need a crossing or rearrangement, returns a lower bound: the first factor is then the number of largest source parts
// needed to fill the largest destination part. The first factor is 1 if a mesh dim becomes partial: ranks may then hold
// any contributions that add up to the value.
int64_t num_sources(const Layout& src, const Layout& dst) {
  const MeshDimSet kept = kept_partials(src, dst);
  const int64_t contributions = src.mesh().group_size(src.partial_dims() - kept);
  if (!(dst.partial_dims() - kept).empty()) return contributions;
  if (src.mesh() == dst.mesh() && !needs_rearrangement(src, dst)) {
    const SharedElements shared(src, dst);
    int64_t holders = 1;
    for (const Matching& matching : shared.matchings()) holders *= matching.sources();
    if (!shared.matchings().empty()) return holders * contributions;
  }
  const int64_t held_bytes = src.largest_part_bytes();
  const int64_t holders = held_bytes > 0 ? ceil_divide(dst.largest_part_bytes(), held_bytes) : 1;
  return std::max<int64_t>(holders, 1) * contributions;
}

// Returns true if the result of a step's reductions depends on the order in which contributions are reduced.
bool depends_on_order(const Step& step) {
  const DTypeKind kind = step.before.dtype().kind();
  if (kind != DTypeKind::kFloat && kind != DTypeKind::kComplex) return false;
  const std::vector<int> reduced = (step.before.partial_dims() - step.after.partial_dims()).to_vector();
  return std::any_of(reduced.begin(), reduced.end(), [&](int d) {
    const ReduceOp op = step.before.placements()[d].op;
    return op != ReduceOp::kMin && op != ReduceOp::kMax;
  });
}

// Returns Certificate::replicas_are_bitwise_equal.
bool keeps_replicas_equal(const Plan& plan) {
  for (const Step& step : plan.steps) {
    if (step.op != StepOp::kAllReduce && step.op != StepOp::kReduceScatter) continue;
    if (!depends_on_order(step)) continue;
    if (!plan.lowering.reduces || step.ordered) continue;  // reduced in the order of positions
    if (!step.before.replicated_dims().empty() || !step.before.is_partition()) return false;
  }
  return true;
}

// Returns true if Certificate::received is an even share of the bytes that several ranks must receive together: if
// the plan must carry out a pending reduction, or if a mesh dim becomes partial.
bool bound_is_even_share(const Plan& plan) {
  const MeshDimSet kept = kept_partials(plan.src, plan.dst);
  return !(plan.src.partial_dims() == kept && plan.dst.partial_dims() == kept);
}

// Returns for example "3 steps with 12 messages, predicted 214 us".
std::string summary(const Plan& plan, const TrafficTotals& traffic) {
  return concat(count_text(traffic.steps, "step"), " with ", count_text(traffic.messages_max, "message"),
                ", predicted ", microseconds_text(predicted_picoseconds(plan)));
}

// Returns true if both plans send the same data in the same steps. Ignores their objectives and topologies.
bool have_equal_moves(const Plan& a, const Plan& b) {
  return a.lowering == b.lowering && a.segments == b.segments &&
         std::equal(a.steps.begin(), a.steps.end(), b.steps.begin(), b.steps.end(), [](const Step& x, const Step& y) {
           return x.op == y.op && x.mesh_dims == y.mesh_dims && x.policy == y.policy && x.rounds == y.rounds &&
                  x.ordered == y.ordered && x.before == y.before && x.after == y.after;
         });
}

// A plan whose worst rank receives the fewest bytes, and its traffic.
struct PlanAndTraffic {
  Plan plan;
  TrafficTotals traffic;
};

// Returns the plan, between the layouts of `plan`, whose worst rank receives the fewest bytes. First tries a single
// move, which needs no search if it meets `bound`. `traffic_of_plan` and `bound` belong to `plan`.
PlanAndTraffic plan_with_fewest_bytes(const Plan& plan, const TrafficTotals& traffic_of_plan, const Bound& bound) {
  const auto traffic_of = [&](const Plan& other) {
    return have_equal_moves(other, plan) ? traffic_of_plan : totals(other);
  };
  PlanOptions options{plan.lowering, Objective::kBytes, false, plan.topology};
  for (const Step& step : plan.steps) options.ordered = options.ordered || step.ordered;
  const bool may_be_one_move = !crosses(plan) && !needs_rearrangement(plan.src, plan.dst);
  if (may_be_one_move && plan.src.partial_dims() == plan.dst.partial_dims()) {
    if (const std::optional<Step> step = move_between(plan.src, plan.dst)) {
      Plan direct{plan.src, plan.dst, plan.lowering, Objective::kBytes, plan.topology, false, {}};
      direct.steps.push_back(named_by_collective(with_policy_if_cheaper(*step, ReplicaPolicy::kEvenBytes, {})));
      const TrafficTotals traffic = traffic_of(direct);
      if (traffic.maxima_are_exact && traffic.received_bytes_max <= bound.bytes_max) return {direct, traffic};
    }
  }
  Plan best = make_plan(plan.src, plan.dst, options);
  const TrafficTotals traffic = traffic_of(best);
  return {std::move(best), traffic};
}

// Returns a sentence that explains why the worst rank receives more than the bound. It names the costs of the plan with
// the fewest bytes, or states that no known plan receives less.
std::string about_bytes(const Plan& plan, const Certificate& certificate) {
  const auto [best, best_traffic] = plan_with_fewest_bytes(plan, certificate.traffic, certificate.received);
  const TrafficTotals& traffic = certificate.traffic;
  const std::string received =
      concat("the worst rank receives ", times_text(traffic.received_bytes_max, certificate.received.bytes_max),
             bound_is_even_share(plan) ? " an even share of the bytes that must be sent" : " the bytes that it needs");
  if (best_traffic.received_bytes_max >= traffic.received_bytes_max) return received + "; no known plan receives less";
  return concat(received, ", in ", summary(plan, traffic), "; the plan with the fewest bytes (",
                bytes_text(best_traffic.received_bytes_max), ") takes ", summary(best, best_traffic));
}

// Returns a sentence about the bytes that the busiest rank sends and their lower bounds, with and without forwarding.
// The plan must be between two meshes (Certificate::crossing is set).
std::string about_senders(const Certificate& certificate) {
  const ExchangeBound& bound = *certificate.crossing;
  return concat("the busiest rank sends ", bytes_text(certificate.traffic.sent_bytes_max),
                "; if only ranks of the source send, the bound is ", bound.direct_is_exact ? "" : "at least ",
                bytes_text(bound.direct_sent_bytes_max),
                bound.forwarded_is_exact ? "; if ranks forward what they receive, it is " : "; for any plan it is ",
                bytes_text(bound.forwarded_sent_bytes_max));
}

}  // namespace

Certificate certify(const Plan& plan, const PeakBytes& peak_bytes) {
  return certify(plan, totals(plan), lower_bound(plan.src, plan.dst), peak_bytes);
}

Certificate certify(const Plan& plan, const TrafficTotals& traffic, const Bound& received,
                    const PeakBytes& peak_bytes) {
  Certificate certificate;
  certificate.traffic = traffic;
  certificate.peak_bytes = peak_bytes.bytes;
  certificate.peak_is_exact = peak_bytes.is_exact;
  certificate.predicted_ps = predicted_picoseconds(plan);
  certificate.replicas_are_bitwise_equal = keeps_replicas_equal(plan);
  certificate.received = received;
  const int64_t total_bytes = certificate.received.bytes_sum;
  certificate.least_sent_bytes = (total_bytes + plan.src.mesh().size() - 1) / plan.src.mesh().size();
  if (crosses(plan)) {
    certificate.crossing = exchange_bound(plan.src, plan.dst, plan.topology.ranks_per_node);
    certificate.least_sent_bytes = certificate.crossing->any_sent_bytes_max;
  }
  certificate.least_steps = total_bytes > 0 ? 1 : 0;
  if (total_bytes > 0) {
    // On one mesh, each message at most doubles the number of ranks whose data the receiver has, because all ranks of
    // a step receive at the same time. Between meshes some ranks may receive first and others later, so a chain of
    // ranks needs only one message each.
    const auto needed = static_cast<uint64_t>(num_sources(plan.src, plan.dst));
    certificate.least_messages = crosses(plan) ? 1 : std::max<int64_t>(std::bit_width(needed - 1), 1);
  }
  certificate.least_peak_bytes = plan.steps.empty() ? 0 : plan.dst.largest_part_bytes();
  // If nothing must be received, a plan may consist of a copy, or of no step at all.
  const int64_t copies =
      plan.steps.empty() ? 0 : picoseconds_for(plan.dst.largest_part_bytes(), plan.topology.memory_ps_per_kib);
  certificate.least_ps = total_bytes > 0 ? least_picoseconds(plan) : std::min(least_picoseconds(plan), copies);
  return certificate;
}

std::vector<BoundedValue> bounded_values(const Certificate& certificate) {
  const TrafficTotals& traffic = certificate.traffic;
  return {{"wire_bytes_max", traffic.received_bytes_max, certificate.received.bytes_max},
          {"wire_bytes_sum", traffic.received_bytes_sum, certificate.received.bytes_sum},
          {"send_bytes_max", traffic.sent_bytes_max, certificate.least_sent_bytes},
          {"messages_max", traffic.messages_max, certificate.least_messages},
          {"steps", traffic.steps, certificate.least_steps},
          {"peak_bytes", certificate.peak_bytes, certificate.least_peak_bytes},
          {"predicted_ps", certificate.predicted_ps, certificate.least_ps}};
}

std::vector<std::string> remarks(const Plan& plan, const Certificate& certificate) {
  const TrafficTotals& traffic = certificate.traffic;
  std::vector<std::string> sentences;
  if (traffic.received_bytes_max > certificate.received.bytes_max) sentences.push_back(about_bytes(plan, certificate));
  if (!traffic.sum_is_exact) {
    sentences.push_back(concat("all ranks together receive between ", bytes_text(certificate.received.bytes_sum),
                               " and ", bytes_text(traffic.received_bytes_sum),
                               "; the mesh is too large for an exact sum"));
  } else if (traffic.received_bytes_sum > certificate.received.bytes_sum &&
             traffic.received_bytes_max <= certificate.received.bytes_max) {
    sentences.push_back(concat("all ranks together receive ",
                               times_text(traffic.received_bytes_sum, certificate.received.bytes_sum),
                               " the bytes that must be sent; the worst rank receives no more than its bound"));
  }
  const bool has_partials = !plan.src.partial_dims().empty() || !plan.dst.partial_dims().empty();
  if (certificate.crossing && !has_partials && traffic.sent_bytes_max > certificate.least_sent_bytes) {
    sentences.push_back(about_senders(certificate));
  } else if (traffic.sent_bytes_max > certificate.least_sent_bytes) {
    sentences.push_back(concat("the busiest rank sends ",
                               times_text(traffic.sent_bytes_max, certificate.least_sent_bytes),
                               " an even share of the bytes that must be sent"));
  }
  if (traffic.messages_max > certificate.least_messages) {
    sentences.push_back(concat(count_text(traffic.messages_max, "message"), "; the bound of ",
                               certificate.least_messages,
                               " assumes that ranks forward each other's data, one message per step"));
  }
  if (traffic.sent_messages_max > traffic.messages_max) {
    sentences.push_back(
        concat("one rank sends ", count_text(traffic.sent_messages_max, "message"), ", more than any rank receives"));
  }
  if (traffic.steps > certificate.least_steps) {
    sentences.push_back(concat(count_text(traffic.steps, "step"), "; the bound is ", certificate.least_steps,
                               ", but fewer steps are slower, move more data, or need more memory"));
  }
  if (certificate.peak_bytes > certificate.least_peak_bytes) {
    sentences.push_back(concat("temporaries take ", bytes_text(certificate.peak_bytes - certificate.least_peak_bytes),
                               " in addition to the result; memory_limit can reduce that"));
  }
  if (certificate.predicted_ps > certificate.least_ps) {
    sentences.push_back(concat("the predicted time is ", times_text(certificate.predicted_ps, certificate.least_ps),
                               " the lower bound for any plan"));
  }
  if (!traffic.maxima_are_exact) {
    sentences.push_back(
        "bytes and messages of the worst rank are those of the outermost ranks; the mesh is too large to examine all");
  }
  if (!certificate.peak_is_exact) {
    sentences.push_back("peak memory is that of the outermost ranks; the mesh is too large to examine all");
  }
  if (!certificate.replicas_are_bitwise_equal) {
    sentences.push_back(
        "replicas are reduced separately and may differ in their last bits; reduce=\"ordered\" makes them equal");
  }
  return sentences;
}

}  // namespace shardwright
