// Makes plans within a memory limit.
#pragma once

#include <cstdint>
#include <optional>

#include "moves/plan.h"
#include "program/memory.h"
#include "search/options.h"

namespace shardwright {

// Returns the bytes that the worst rank's program allocates: its result and its temporaries. If there are more than
// kMaxRanksExamined classes of ranks, only the outermost and boundary ones are examined; the result may then be too
// low, and is_exact is false.
PeakBytes max_peak_bytes(const Plan& plan);
int64_t peak_bytes(const Plan& plan);  // max_peak_bytes() without is_exact

// Returns the cheapest plan found whose peak_bytes are at most `memory_limit`. To save memory, it splits steps into
// rounds, uses smaller intermediate layouts, or both. Without a limit, temporaries may take the larger of source and
// destination plus kStagingBytes; if every plan found needs more, returns the one that needs least. Throws UserError if
// no plan meets a given limit; the message names the smallest limit for which a plan was found.
constexpr int64_t kStagingBytes = int64_t{256} << 20;  // 256 MiB
Plan make_plan_within(const Layout& src, const Layout& dst, const PlanOptions& options,
                      std::optional<int64_t> memory_limit);

}  // namespace shardwright
