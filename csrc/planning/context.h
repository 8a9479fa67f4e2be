// The planning context: everything that a plan depends on besides its two layouts. A *pinned* plan is prescribed by the
// user for two layouts and a lowering.
//
// Every planning function takes a context. None reads a table, a pin or an environment variable itself. So the same
// layouts and context give the same plan on every rank at any time, and plans can be cached.
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

// Pinned plans by layouts and lowering. A pinned plan is used instead of searching for one. Immutable; changes return a
// new object.
class Pins {
 public:
  // Returns null if no plan is pinned.
  CertifiedPlanPtr find(const Layout& src, const Layout& dst, const Lowering& lowering) const;
  // Returns these pins and `plan`, which replaces the plan that is pinned for the same layouts and lowering, if any.
  PinsPtr with(CertifiedPlanPtr plan) const;
  // Returns these pins without the one for the layouts and lowering of this plan. Throws UserError if there is none.
  PinsPtr without(const Plan& plan) const;

  // Returns the plans whose source is on this mesh and whose lowering is this one. The order is the same in every
  // process.
  std::vector<CertifiedPlanPtr> on(const Mesh& mesh, const Lowering& lowering) const;

  size_t size() const { return plans_.size(); }
  // Returns true if both have equal plans, compared step by step, for the same layouts and lowerings.
  bool operator==(const Pins& other) const;
  size_t hash() const { return hash_; }

 private:
  // The key of a pin.
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
    std::string bytes;  // of the plan (planning/serialize.h), to compare and hash it
  };

  std::unordered_map<Ends, Pinned, HashOfEnds> plans_;
  size_t hash_ = 0;  // independent of the order in which plans were pinned
};

class PlanningContext;
using ContextPtr = std::shared_ptr<const PlanningContext>;

// Immutable and shared.
class PlanningContext : public std::enable_shared_from_this<PlanningContext> {
 public:
  // Makes a context. Options without a topology get the default of their lowering. `memory_limit` is in bytes. `pins`
  // may be null. Throws UserError if the memory limit is negative or Topology::check throws.
  static ContextPtr make(PlanOptions options, std::optional<int64_t> memory_limit = std::nullopt,
                         PinsPtr pins = nullptr);

  // The settings of the search: lowering, objective, topology (always set), groups and so on.
  const PlanOptions& options() const { return options_; }
  const Lowering& lowering() const { return options_.lowering; }
  const Topology& topology() const { return *options_.topology; }
  // Returns the maximum number of bytes that a rank may allocate, if there is a limit (planning/memory_limit.h).
  std::optional<int64_t> memory_limit() const { return memory_limit_; }

  // Returns the plan that is pinned for these layouts, or null. It takes precedence over the search, whatever the
  // options.
  CertifiedPlanPtr pinned(const Layout& src, const Layout& dst) const;
  bool has_pins() const { return pins_ != nullptr; }
  // Returns this context without pins. Plans that the search finds do not depend on pins, so the context without pins
  // is part of their cache key.
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
// Immutable.
struct PlanningTables {
  PinsPtr pins;                                                          // null if there are none
  std::map<std::string, Topology, std::less<>> topologies;               // measured, by the name of a lowering
  std::optional<Topology> environment;                                   // of SHARDWRIGHT_TOPOLOGY
  std::map<std::pair<std::string, std::string>, GemmModel> gemm_models;  // measured, by device type and dtype

  bool operator==(const PlanningTables& other) const;
  // Equal tables have equal hashes in every process.
  size_t hash() const;
  // Returns, for each table, its name and a short description with a hash of its content. The ranks of a job compare
  // these; hashes are the same in every process.
  std::vector<std::pair<std::string, std::string>> summary() const;
};

// Returns the topology for a plan: `requested`, or else the topology of the source mesh, of the destination mesh, the
// measured topology of the lowering, the topology of the environment, or the default topology of the lowering.
Topology topology_between(const Layout& src, const Layout& dst, const Lowering& lowering,
                          const std::optional<Topology>& requested, const PlanningTables& tables);

}  // namespace shardwright
