// Who sends what to whom when the ranks of a group go from one layout to another: shared by the planner, which
// counts it, and the compiler, which writes it down.
//
// Where several ranks hold the same part (mesh dims replicated in `before`), a receiver reads from the replica that has
// its own coordinates on those mesh dims. Parts held at equal coordinates on the cutting dims are the receiver's own
// and stay local. So every element comes from exactly one place.
#pragma once

#include <cstdint>
#include <vector>

#include "planner/plan.h"

namespace shardwright {

// Position of the rank that `receiver` reads the part of `holder` from, `holder` and `receiver` in one group.
int64_t source_for(const Step& step, int64_t holder, int64_t receiver);

// Positions `receiver` reads from, itself included, by ascending rank: one per combination of coordinates on the
// dims that cut `before`. They hold disjoint parts that together cover what the group holds.
std::vector<int64_t> sources_of(const Step& step, int64_t receiver);

// Elements that `receiver` takes from `source`, 0 where it reads from another replica.
int64_t transfer_elements(const Step& step, int64_t source, int64_t receiver);

// Whether the backend's own collectives carry out the reduction of a step; else it is exchanged and summed here.
bool reduces_natively(const Step& step, Backend backend);

// Chunk of a flat range of n elements over k ranks: [index * ceil(n / k), ...).
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
