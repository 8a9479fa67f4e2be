// The planning context: everything that a plan depends on besides its two layouts.
//
// Whatever plans is given one. Nothing on the way to a plan reads a table, a pin or an environment variable by itself,
// so what is kept under layouts and context is what planning again would give, on every rank and at any time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "cost/gemm_model.h"
#include "planning/certified_plan.h"
#include "search/options.h"

namespace shardwright {

class Pins;
using PinsPtr = std::shared_ptr<const Pins>;

// Plans that were given instead of searched for, by layouts and lowering. Immutable: changing it makes another.
class Pins {
 public:
  // Null where none is pinned.
  CertifiedPlanPtr find(const Layout& src, const Layout& dst, const Lowering& lowering) const;
  // With this plan for its own ends and lowering, in place of any other.
  PinsPtr with(CertifiedPlanPtr plan) const;
  // Throws UserError where nothing is pinned for the ends and lowering of this plan.
  PinsPtr without(const Plan& plan) const;

  // All plans on a mesh with this lowering, in an order that is the same in every process.
  std::vector<CertifiedPlanPtr> on(const Mesh& mesh, const Lowering& lowering) const;

  size_t size() const { return plans_.size(); }
  // The same plans, step by step.
  bool operator==(const Pins& other) const;
  size_t hash() const { return hash_; }

 private:
  struct Ends {
    Layout src;
    Layout dst;
    Lowering lowering;
    bool operator==(const Ends& other) const = default;
  };
  struct HashOfEnds {
    size_t operator()(const Ends& ends) const { return ends.src.hash() * 31 + ends.dst.hash(); }
  };
  struct Pinned {
    CertifiedPlanPtr plan;
    std::string bytes;
  };

  std::unordered_map<Ends, Pinned, HashOfEnds> plans_;
  size_t hash_ = 0;  // whatever the order in which plans were pinned
};

class PlanningContext;
using ContextPtr = std::shared_ptr<const PlanningContext>;

// A value, shared and never changed.
class PlanningContext : public std::enable_shared_from_this<PlanningContext> {
 public:
  // Options without a topology get the default of their lowering. `pins` may be null: none.
  // Throws UserError on a memory limit below 0 and on a topology that Topology::check refuses.
  static ContextPtr make(PlanOptions options, std::optional<int64_t> memory_limit = std::nullopt,
                         PinsPtr pins = nullptr);

  // What the search goes by: lowering, objective, topology (always there), groups, ...
  const PlanOptions& options() const { return options_; }
  const Lowering& lowering() const { return options_.lowering; }
  const Topology& topology() const { return *options_.topology; }
  std::optional<int64_t> memory_limit() const { return memory_limit_; }

  // The plan that is pinned for this pair, or null. It comes before all that is searched for, whatever the options.
  CertifiedPlanPtr pinned(const Layout& src, const Layout& dst) const;
  bool has_pins() const { return pins_ != nullptr; }
  // The same without pins: all that a plan depends on which is searched for.
  ContextPtr without_pins() const { return without_pins_ ? without_pins_ : shared_from_this(); }

  bool operator==(const PlanningContext& other) const;
  size_t hash() const { return hash_; }

 private:
  PlanningContext() = default;

  PlanOptions options_;
  std::optional<int64_t> memory_limit_;
  PinsPtr pins_;             // null where there are none
  ContextPtr without_pins_;  // null where this is it
  size_t hash_ = 0;
};

// What a process plans by where a call does not say: pinned plans and what was measured. Immutable, like the rest.
struct PlanningTables {
  PinsPtr pins;                                                          // null: none
  std::map<std::string, Topology, std::less<>> topologies;               // by the name of a lowering
  std::optional<Topology> environment;                                   // what the environment says
  std::map<std::pair<std::string, std::string>, GemmModel> gemm_models;  // by device type and dtype

  bool operator==(const PlanningTables& other) const;
  size_t hash() const;
  // By name what ranks of one job have in common: short, with a hash of what is behind it, the same in every process.
  std::vector<std::pair<std::string, std::string>> summary() const;
};

// What joins the ranks of two layouts: what is asked for, else what the source's mesh says, else the destination's,
// else what was measured for the lowering, else what the environment says, else the lowering's default.
Topology topology_between(const Layout& src, const Layout& dst, const Lowering& lowering,
                          const std::optional<Topology>& asked, const PlanningTables& tables);

}  // namespace shardwright
