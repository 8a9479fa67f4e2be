// Makes plans within a memory limit.
#pragma once

#include <cstdint>
#include <optional>

#include "moves/plan.h"
#include "program/memory.h"
#include "search/options.h"

namespace shardwright {

// Returns the most bytes that a rank's program allocates at once for its result and its temporaries, over all ranks. If
// there are more than kMaxRanksExamined classes of ranks (moves/rank_classes.h), only the outermost and boundary ranks
// are examined; the result may then be too low, and is_exact is false.
PeakBytes max_peak_bytes(const Plan& plan);
int64_t peak_bytes(const Plan& plan);  // max_peak_bytes() without is_exact

constexpr int64_t kStagingBytes = int64_t{256} << 20;  // 256 MiB: see make_plan_within

// Returns the cheapest plan found whose peak_bytes are at most `memory_limit`, in bytes. To save memory, it splits
// steps into rounds, uses smaller intermediate layouts, or both. Without a limit, temporaries may take the bytes of the
// larger part (source or destination) plus kStagingBytes; if every plan found needs more, returns the plan that needs
// least. Throws UserError as make_plan does (search/make_plan.h), if the limit is negative, or if no plan found meets a
// given limit; the message then names the smallest limit for which a plan was found.
Plan make_plan_within(const Layout& src, const Layout& dst, const PlanOptions& options,
                      std::optional<int64_t> memory_limit);

}  // namespace shardwright
