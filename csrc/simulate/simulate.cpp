#include "simulate/simulate.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>

#include "moves/describe.h"
#include "moves/traffic.h"
#include "program/program.h"
#include "simulate/machine.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Throws an InvariantError with the plan and a message.
template <typename... Parts>
[[noreturn]] void fail(const Plan& plan, const Parts&... parts) {
  throw InvariantError(concat("the simulation disagrees with the plan ", to_string(plan), "\n", parts...));
}

// Returns the row-major global indices of a region's elements, in local order.
std::vector<int64_t> global_indices(const Region& region, const std::vector<int64_t>& shape) {
  std::vector<int64_t> indices{0};
  for (size_t t = 0; t < shape.size(); ++t) {
    std::vector<int64_t> wider;
    wider.reserve(indices.size() * static_cast<size_t>(length(region[t])));
    for (const int64_t outer : indices) {
      for (const Interval& interval : region[t]) {
        for (int64_t i = interval.begin; i < interval.end; ++i) wider.push_back(outer * shape[t] + i);
      }
    }
    indices = std::move(wider);
  }
  return indices;
}

// Returns the mesh dims that become partial. A plan between two meshes first does all pending reductions.
MeshDimSet new_partial_dims(const Plan& plan) {
  return crosses(plan) ? plan.dst.partial_dims() : plan.dst.partial_dims() - plan.src.partial_dims();
}

// The values that ranks hold before the plan and must hold after it.
class Expectation {
 public:
  explicit Expectation(const Plan& plan)
      : mesh_(plan.src.mesh()),
        partial_(plan.src.partial_dims()),
        kept_(crosses(plan) ? MeshDimSet() : plan.src.partial_dims() & plan.dst.partial_dims()),
        reduced_(plan.src.partial_dims() - kept_) {
    for (const int d : reduced_.to_vector()) {
      const Placement& placement = plan.src.placements()[d];
      op_ = placement.op;
      power_ = placement.norm_power;
      if (op_ == ReduceOp::kAvg) divisor_ *= static_cast<double>(mesh_.dim_size(d));
    }
    if (op_ == ReduceOp::kAvg) op_ = ReduceOp::kSum;
    num_reduced_ = mesh_.group_size(reduced_);
  }

  // Returns the rank's value of an element before the plan: the element's number plus one, or the rank's contribution
  // to a pending reduction.
  double held(int64_t position, int64_t element) const {
    if (partial_.empty()) return static_cast<double>(element + 1);
    return contribution(mesh_.coordinate_index(position, kept_.to_vector()),
                        mesh_.coordinate_index(position, reduced_.to_vector()), element);
  }

  // Returns the value that an element must have after the plan's reductions on the rank at a position. It depends only
  // on the coordinates on the mesh dims that stay partial.
  double expected(int64_t position, int64_t element) const {
    if (partial_.empty()) return static_cast<double>(element + 1);
    const int64_t kept = mesh_.coordinate_index(position, kept_.to_vector());
    double value = summand(kept, 0, element);
    for (int64_t i = 1; i < num_reduced_; ++i) value = combine(op_, value, summand(kept, i, element));
    value /= divisor_;
    return power_ != 0 ? std::pow(value, 1.0 / power_) : value;
  }

 private:
  // Returns the contribution to an element of the rank with these indices on kept_ and reduced_: a small integer, so
  // that sums and products are exact. Neighboring elements and ranks have different contributions.
  static double contribution(int64_t kept, int64_t reduced, int64_t element) {
    return static_cast<double>(1 + (element * 7 + kept * 5 + reduced * 3 + element / 11) % 13);
  }

  // Returns the number that the reduction combines: the contribution, raised to the power of a pending norm.
  double summand(int64_t kept, int64_t reduced, int64_t element) const {
    const double value = contribution(kept, reduced, element);
    return power_ != 0 ? std::pow(value, power_) : value;
  }

  const Mesh& mesh_;
  MeshDimSet partial_;       // mesh dims with pending reductions before the plan
  MeshDimSet kept_;          // mesh dims whose reductions are still pending after the plan
  MeshDimSet reduced_;       // mesh dims that the plan reduces
  int64_t num_reduced_ = 1;  // contributions to each reduced element
  ReduceOp op_ = ReduceOp::kSum;
  double power_ = 0;    // power of a norm; 0: no norm
  double divisor_ = 1;  // of an average
};

// Returns true if the values are equal up to rounding.
bool close(double a, double b) { return a == b || std::fabs(a - b) <= 1e-9 * std::max(std::fabs(a), std::fabs(b)); }

// Checks mesh dims that become partial: the values of the ranks along them must reduce to the expected value. Values
// are collected over all ranks.
class NewPartials {
 public:
  explicit NewPartials(const Plan& plan) : plan_(plan), dims_(new_partial_dims(plan)) {
    for (const int d : dims_.to_vector()) placement_ = plan.dst.placements()[d];
  }

  // Returns true if some mesh dim becomes partial.
  bool any() const { return !dims_.empty(); }

  // Adds the value that one rank holds of an element. `expected` is the value to which all ranks' values must reduce.
  void add(int64_t position, int64_t element, double value, double expected) {
    const Mesh& mesh = plan_.dst.mesh();
    int64_t base = position;
    for (const int d : dims_.to_vector()) base -= mesh.coordinate(position, d) * mesh.stride(d);
    std::vector<Entry>& entries = entries_[base];
    if (entries.empty()) entries.resize(plan_.src.num_elements());
    Entry& entry = entries[element];
    if (placement_.op == ReduceOp::kNorm) value = std::pow(value, placement_.norm_power);
    entry.value = entry.count == 0 ? value : combine(placement_.op, entry.value, value);
    entry.expected = expected;
    ++entry.count;
  }

  // Throws InvariantError unless the values of each element reduce to its expected value.
  void check() const {
    const Mesh& mesh = plan_.dst.mesh();
    const int64_t n = mesh.group_size(dims_);
    double divisor = 1;
    for (const int d : dims_.to_vector()) {
      if (plan_.dst.placements()[d].op == ReduceOp::kAvg) divisor *= static_cast<double>(mesh.dim_size(d));
    }
    for (const auto& [base, entries] : entries_) {
      for (size_t element = 0; element < entries.size(); ++element) {
        const Entry& entry = entries[element];
        if (entry.count == 0) continue;  // the element is in the part of other ranks
        double value = entry.value / divisor;
        if (placement_.op == ReduceOp::kNorm) value = std::pow(value, 1.0 / placement_.norm_power);
        if (entry.count != n) {
          fail(plan_, "element ", element, " is reduced from ", entry.count, " contributions instead of ", n);
        }
        if (!close(value, entry.expected)) {
          fail(plan_, "element ", element, " reduces to ", value, " instead of ", entry.expected);
        }
      }
    }
  }

 private:
  struct Entry {
    double value = 0;     // reduction of the values added so far
    double expected = 0;  // expected value
    int64_t count = 0;    // number of values added so far
  };

  const Plan& plan_;
  MeshDimSet dims_;
  Placement placement_;
  // Entries of all elements, by the position with coordinate 0 on the new partial dims.
  std::map<int64_t, std::vector<Entry>> entries_;
};

// Returns the elements that the rank holds before the plan.
Machine::Payload input_of(const Plan& plan, const Expectation& expectation, Rank rank) {
  const std::optional<Position> position = plan.src.mesh().position_of(rank);
  Machine::Payload values;
  if (!position) return values;
  for (const int64_t element : global_indices(plan.src.region(*position), plan.src.shape())) {
    values.push_back(expectation.held(*position, element));
  }
  return values;
}

// Throws InvariantError unless a rank's result has the expected elements. If mesh dims become partial, checks only the
// number of elements, and adds their values to `new_partials`, which checks them. Returns the number of elements.
int64_t check_result(const Plan& plan, const Expectation& expectation, Rank rank, const Machine::Payload& output,
                     NewPartials& new_partials) {
  const std::optional<Position> position = plan.dst.mesh().position_of(rank);
  if (!position) {
    if (!output.empty())
      fail(plan, "rank ", rank, " ends with ", output.size(), " elements but is not on the mesh of the destination");
    return 0;
  }
  const std::vector<int64_t> elements = global_indices(plan.dst.region(*position), plan.dst.shape());
  if (output.size() != elements.size() && !elements.empty()) {
    fail(plan, "rank ", rank, " ends with ", output.size(), " elements instead of ", elements.size());
  }
  for (size_t i = 0; i < elements.size(); ++i) {
    const double expected = expectation.expected(*position, elements[i]);
    if (new_partials.any()) {
      new_partials.add(*position, elements[i], output[i], expected);
    } else if (!close(output[i], expected)) {
      fail(plan, "rank ", rank, " holds ", output[i], " instead of ", expected, " as element ", elements[i]);
    }
  }
  return static_cast<int64_t>(elements.size());
}

// Estimates the bytes of a rank's program and of its messages in flight. A message stores two integers for each member
// of its group.
double program_bytes(const Program& program) {
  constexpr double kBoxBytes = 200;  // a box with its three lists
  constexpr double kMemberBytes = 40;
  constexpr double kMessageBytes = 400;
  double bytes = 0;
  const auto members = [&](const IsTransfer auto& transfer) {
    return static_cast<double>(program.groups[transfer.group].ranks.size());
  };
  for (const Instruction& instruction : program.instructions) {
    bytes += match(
        instruction.operation, [&](const Copy& o) { return static_cast<double>(o.boxes.size()) * kBoxBytes; },
        [&](const SendReceive& o) {
          const auto count = static_cast<double>(o.sends.size() + o.receives.size());
          return members(o) * kMemberBytes + count * (kMessageBytes + members(o) * 2 * sizeof(int64_t));
        },
        [&](const IsTransfer auto& o) { return members(o) * kMemberBytes; }, [](const IsCompute auto&) { return 0.0; },
        [](const Wait&) { return 0.0; });
  }
  for (const Group& group : program.groups) bytes += static_cast<double>(group.ranks.size()) * kMemberBytes;
  return bytes;
}

}  // namespace

SimulationReport simulate(const Plan& plan) {
  const Expectation expectation(plan);
  Machine machine;
  SimulationReport report;
  for (const Rank rank : ranks_of(plan)) {
    Program program = compile(plan, rank);
    report.peak_bytes[rank] = program.peak_bytes();
    machine.add(rank, std::move(program), {input_of(plan, expectation, rank)});
  }
  machine.run();

  NewPartials new_partials(plan);
  for (const auto& [rank, predicted_peak] : report.peak_bytes) {
    report.elements_checked += check_result(plan, expectation, rank, machine.output(rank), new_partials);
    const int64_t received = machine.received_bytes(rank);
    const int64_t predicted = traffic_at(plan, rank).received_bytes;
    if (received != predicted) fail(plan, "rank ", rank, " receives ", received, " bytes instead of ", predicted);
    if (machine.peak_bytes(rank) != predicted_peak) {
      fail(plan, "rank ", rank, " allocates ", machine.peak_bytes(rank), " bytes instead of ", predicted_peak);
    }
    report.received_bytes[rank] = received;
    report.received_bytes_sum += received;
  }
  new_partials.check();
  return report;
}

int64_t simulation_bytes(const Plan& plan, int64_t peak_bytes) {
  const std::vector<Rank> all = ranks_of(plan);
  const auto ranks = static_cast<double>(all.size());
  const auto item = static_cast<double>(plan.src.dtype().size_bytes());
  const auto elements = [&](const Layout& layout) { return static_cast<double>(layout.largest_part_bytes()) / item; };
  // The number of doubles that a rank holds at once: its input, its buffers, its contributions to collectives, which
  // the simulation keeps to the end, and the indices with which results are checked.
  double values = elements(plan.src) + static_cast<double>(peak_bytes) / item + 2 * elements(plan.dst);
  for (const Step& step : plan.steps) values += is_local(step.op) ? 0 : elements(step.before);
  const auto of_program = [&](Rank rank) { return program_bytes(compile(plan, rank)); };
  const double program = std::max(of_program(all.front()), of_program(all[all.size() / 2]));
  double bytes = ranks * (values * sizeof(double) + program);
  const MeshDimSet new_dims = new_partial_dims(plan);
  if (!new_dims.empty()) {  // for each element a value, the expected value and a count
    bytes += ranks / static_cast<double>(plan.dst.mesh().group_size(new_dims)) *
             static_cast<double>(plan.src.num_elements()) * 24;
  }
  return static_cast<int64_t>(std::min(bytes, 0x1p62));
}

}  // namespace shardwright
