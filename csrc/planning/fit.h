// Plans that keep to a memory limit.
#pragma once

#include <cstdint>
#include <optional>

#include "moves/plan.h"
#include "program/memory.h"
#include "search/options.h"

namespace shardwright {

// What the program of the worst rank allocates: its result and temporaries. Of more than kMaxRanksWalked classes of
// ranks the outermost and boundary ones are looked at, and the figure may then be too low: is_exact is false.
PeakBytes worst_peak_bytes(const Plan& plan);
int64_t peak_bytes(const Plan& plan);

// The plan with the least cost among those found whose peak_bytes are at most `memory_limit`: steps go in rounds, keep
// to smaller intermediates, or both. Without a limit temporaries may take as much as the larger of source and
// destination and kStagingBytes more, wherever some plan does with that. Throws UserError naming the least limit that
// a plan was found for.
constexpr int64_t kStagingBytes = int64_t{256} << 20;
Plan make_plan_within(const Layout& src, const Layout& dst, const PlanOptions& options,
                      std::optional<int64_t> memory_limit);

}  // namespace shardwright
