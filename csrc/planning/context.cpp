#include "planning/context.h"

#include <functional>

#include "planning/serialize.h"
#include "support/error.h"

namespace shardwright {
namespace {

// A hash of a sequence of values.
class Hash {
 public:
  // Each with() adds a value to the sequence.
  Hash& with(uint64_t value) {
    hash_ = (hash_ ^ value) * 0x9E3779B97F4A7C15u;
    hash_ ^= hash_ >> 32;
    return *this;
  }
  Hash& with(int64_t value) { return with(static_cast<uint64_t>(value)); }
  Hash& with(std::string_view text) { return with(static_cast<uint64_t>(std::hash<std::string_view>()(text))); }
  Hash& with(const Link& link) { return with(link.message_ps).with(link.ps_per_kib); }
  Hash& with(const Topology& topology) {
    with(std::string_view(topology.name)).with(topology.ranks_per_node).with(topology.step_ps);
    with(topology.memory_ps_per_kib).with(topology.inside).with(topology.between);
    for (const auto& [mesh_dim, link] : topology.mesh_dims) with(std::string_view(mesh_dim)).with(link);
    return *this;
  }
  Hash& with(const GemmModel& model) {
    with(std::string_view(model.name)).with(model.num_processors).with(model.tile_rows).with(model.tile_columns);
    with(model.flops_per_us).with(model.launch_ps).with(model.memory_ps_per_kib);
    return with(model.contention_percent).with(model.chunk_ps).with(model.transfer_processors);
  }
  Hash& with(const PlanOptions& options) {
    with(options.lowering.name).with(static_cast<uint64_t>(options.objective) * 2 + options.ordered);
    for (const MeshDimSet& dims : options.groups) with(uint64_t{dims.bits()});
    with(options.max_held).with(uint64_t{options.segments});
    return options.topology ? with(*options.topology) : *this;
  }
  size_t value() const { return static_cast<size_t>(hash_); }

 private:
  uint64_t hash_ = 0;
};

// Returns true if both are null or point to equal pins.
bool equal_pins(const PinsPtr& a, const PinsPtr& b) { return a == b || (a && b && *a == *b); }

// Returns null instead of an empty set of pins, so that contexts without pins compare equal.
PinsPtr null_if_empty(PinsPtr pins) { return pins && pins->size() > 0 ? std::move(pins) : nullptr; }

}  // namespace

CertifiedPlanPtr Pins::find(const Layout& src, const Layout& dst, const Lowering& lowering) const {
  const auto found = plans_.find({src, dst, lowering});
  return found == plans_.end() ? nullptr : found->second.plan;
}

std::vector<CertifiedPlanPtr> Pins::on(const Mesh& mesh, const Lowering& lowering) const {
  std::map<std::string, CertifiedPlanPtr> by_bytes;
  for (const auto& [ends, pinned] : plans_) {
    if (ends.lowering == lowering && ends.src.mesh() == mesh) by_bytes.emplace(pinned.bytes, pinned.plan);
  }
  std::vector<CertifiedPlanPtr> plans;
  for (const auto& [bytes, plan] : by_bytes) plans.push_back(plan);
  return plans;
}

PinsPtr Pins::with(CertifiedPlanPtr plan) const {
  auto changed = std::make_shared<Pins>(*this);
  std::string bytes = to_bytes(plan->plan());
  Pinned& entry = changed->plans_[{plan->plan().src, plan->plan().dst, plan->plan().lowering}];
  changed->hash_ ^= std::hash<std::string>()(entry.bytes) ^ std::hash<std::string>()(bytes);
  entry = {std::move(plan), std::move(bytes)};
  return changed;
}

PinsPtr Pins::without(const Plan& plan) const {
  const auto found = plans_.find({plan.src, plan.dst, plan.lowering});
  check_argument(found != plans_.end(), "plan", "a pinned plan (same layouts and lowering)", plan.src, " -> ", plan.dst,
                 " over ", plan.lowering.name);
  auto changed = std::make_shared<Pins>(*this);
  changed->hash_ ^= std::hash<std::string>()(found->second.bytes) ^ std::hash<std::string>()("");
  changed->plans_.erase(found->first);
  return changed;
}

bool Pins::operator==(const Pins& other) const {
  if (hash_ != other.hash_ || plans_.size() != other.plans_.size()) return false;
  for (const auto& [ends, pinned] : plans_) {
    const auto found = other.plans_.find(ends);
    if (found == other.plans_.end() || found->second.bytes != pinned.bytes) return false;
  }
  return true;
}

ContextPtr PlanningContext::make(PlanOptions options, std::optional<int64_t> memory_limit, PinsPtr pins) {
  check_argument(memory_limit.value_or(0) >= 0, "memory_limit", "at least 0 bytes", memory_limit.value_or(0));
  if (!options.topology) options.topology = Topology::named(options.lowering.default_topology);
  options.topology->check();
  const std::shared_ptr<PlanningContext> context(new PlanningContext);
  context->options_ = std::move(options);
  context->memory_limit_ = memory_limit;
  context->pins_ = null_if_empty(std::move(pins));
  context->hash_ = Hash().with(context->options_).with(memory_limit.value_or(-1)).value();
  if (context->pins_) {
    const std::shared_ptr<PlanningContext> bare(new PlanningContext(*context));
    bare->pins_ = nullptr;
    context->without_pins_ = bare;
    context->hash_ = Hash().with(uint64_t{context->hash_}).with(uint64_t{context->pins_->hash()}).value();
  }
  return context;
}

CertifiedPlanPtr PlanningContext::pinned(const Layout& src, const Layout& dst) const {
  return pins_ ? pins_->find(src, dst, lowering()) : nullptr;
}

bool PlanningContext::operator==(const PlanningContext& other) const {
  return this == &other || (hash_ == other.hash_ && memory_limit_ == other.memory_limit_ &&
                            options_ == other.options_ && equal_pins(pins_, other.pins_));
}

bool PlanningTables::operator==(const PlanningTables& other) const {
  return topologies == other.topologies && environment == other.environment && gemm_models == other.gemm_models &&
         equal_pins(null_if_empty(pins), null_if_empty(other.pins));
}

size_t PlanningTables::hash() const {
  Hash hash;
  hash.with(uint64_t{pins ? pins->hash() : 0});
  if (environment) hash.with(*environment);
  for (const auto& [lowering, topology] : topologies) hash.with(std::string_view(lowering)).with(topology);
  for (const auto& [key, model] : gemm_models) hash.with(std::string_view(key.second)).with(model);
  return hash.value();
}

std::vector<std::pair<std::string, std::string>> PlanningTables::summary() const {
  const auto named = [](const auto& table) { return concat(table.name, " with hash ", Hash().with(table).value()); };
  std::vector<std::pair<std::string, std::string>> fields;
  const size_t count = pins ? pins->size() : 0;
  fields.emplace_back("pinned plans", count == 0 ? "none" : concat(count, " with hash ", pins->hash()));
  std::vector<std::string> measured;
  for (const auto& [lowering, topology] : topologies) measured.push_back(concat(lowering, ": ", named(topology)));
  fields.emplace_back("measured topologies", measured.empty() ? "none" : join(measured));
  fields.emplace_back("topology of the environment", environment ? named(*environment) : "none");
  std::vector<std::string> products;
  for (const auto& [key, model] : gemm_models) {
    products.push_back(concat(key.first, " ", key.second, ": ", named(model)));
  }
  fields.emplace_back("measured products", products.empty() ? "none" : join(products));
  return fields;
}

Topology topology_between(const Layout& src, const Layout& dst, const Lowering& lowering,
                          const std::optional<Topology>& requested, const PlanningTables& tables) {
  if (requested) return *requested;
  for (const Layout* end : {&src, &dst}) {
    if (end->mesh().topology()) return *end->mesh().topology();
  }
  const auto measured = tables.topologies.find(lowering.name);
  if (measured != tables.topologies.end()) return measured->second;
  return tables.environment ? *tables.environment : Topology::named(lowering.default_topology);
}

}  // namespace shardwright
