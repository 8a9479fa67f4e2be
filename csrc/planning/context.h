// The planning context: everything that a plan depends on besides its two layouts.
//
// Every function that plans takes a context. None of them reads a table, a pin or an environment variable by itself. So
// a plan cached under its layouts and context is the plan that planning again would make, on every rank, at any time.
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

// Pinned plans by layouts and lowering: plans that are used in place of what the search would find. Immutable; changes
// return a new object.
class Pins {
 public:
  // Returns null if no plan is pinned.
  CertifiedPlanPtr find(const Layout& src, const Layout& dst, const Lowering& lowering) const;
  // Pins this plan for its own layouts and lowering, replacing any other.
  PinsPtr with(CertifiedPlanPtr plan) const;
  // Throws UserError if nothing is pinned for the layouts and lowering of this plan.
  PinsPtr without(const Plan& plan) const;

  // Returns all plans on a mesh with this lowering, in an order that is the same in every process.
  std::vector<CertifiedPlanPtr> on(const Mesh& mesh, const Lowering& lowering) const;

  size_t size() const { return plans_.size(); }
  // Compares the plans step by step.
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
  size_t hash_ = 0;  // independent of the order in which plans were pinned
};

class PlanningContext;
using ContextPtr = std::shared_ptr<const PlanningContext>;

// An immutable value that is shared.
class PlanningContext : public std::enable_shared_from_this<PlanningContext> {
 public:
  // Options without a topology get the default of their lowering. `pins` may be null.
  // Throws UserError on a negative memory limit and on a topology that Topology::check refuses.
  static ContextPtr make(PlanOptions options, std::optional<int64_t> memory_limit = std::nullopt,
                         PinsPtr pins = nullptr);

  // The settings that the search depends on: lowering, objective, topology (always set), groups, ...
  const PlanOptions& options() const { return options_; }
  const Lowering& lowering() const { return options_.lowering; }
  const Topology& topology() const { return *options_.topology; }
  std::optional<int64_t> memory_limit() const { return memory_limit_; }

  // The plan that is pinned for this pair of layouts, or null. It takes precedence over the search, whatever the
  // options.
  CertifiedPlanPtr pinned(const Layout& src, const Layout& dst) const;
  bool has_pins() const { return pins_ != nullptr; }
  // The same context without pins: everything that a plan found by the search depends on.
  ContextPtr without_pins() const { return without_pins_ ? without_pins_ : shared_from_this(); }

  bool operator==(const PlanningContext& other) const;
  size_t hash() const { return hash_; }

 private:
  PlanningContext() = default;

  PlanOptions options_;
  std::optional<int64_t> memory_limit_;
  PinsPtr pins_;             // null if there are none
  ContextPtr without_pins_;  // null if this context has no pins
  size_t hash_ = 0;
};

// The process-wide defaults for contexts: pinned plans, measured tables, and the topology of the environment.
// Immutable, like contexts.
struct PlanningTables {
  PinsPtr pins;                                                          // null: none
  std::map<std::string, Topology, std::less<>> topologies;               // measured, by the name of a lowering
  std::optional<Topology> environment;                                   // from the environment variable
  std::map<std::pair<std::string, std::string>, GemmModel> gemm_models;  // by device type and dtype

  bool operator==(const PlanningTables& other) const;
  size_t hash() const;
  // A short description of each table with a hash of its content, by name. The ranks of a job compare these; hashes are
  // the same in every process.
  std::vector<std::pair<std::string, std::string>> summary() const;
};

// Returns the first of these that is set: the topology `asked` for, the source mesh's, the destination mesh's, the one
// measured for the lowering, the environment's, the lowering's default.
Topology topology_between(const Layout& src, const Layout& dst, const Lowering& lowering,
                          const std::optional<Topology>& asked, const PlanningTables& tables);

}  // namespace shardwright
