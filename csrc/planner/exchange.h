// Who sends what to whom when the ranks of a group go from one layout to another: shared by the planner, which
// counts it, and the compiler, which writes it down.
//
// Where several ranks hold the same part (mesh dims replicated in `before`), a receiver reads from the replica that has
// its own coordinates on those mesh dims. Parts held at equal coordinates on the cutting dims are the receiver's own
// and stay local. So every element comes from exactly one place.
#pragma once

#include <cstdint>
#include <span>
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

// What the rank at `position` holds of a tensor dim of n elements.
IntervalList part_at(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position);

// The parts into which mesh dims cut a tensor dim of n elements, as far as they meet a target: how many, and what of
// it. Mesh dims in `varying` take every coordinate, others that of `position`.
struct Meeting {
  int64_t elements = 0;
  int64_t parts = 0;
};

Meeting meet(const Mesh& mesh, int64_t n, std::span<const Cut> cuts, int64_t position, MeshDimSet varying,
             const IntervalList& target);

// What the rank at `position` receives and sends in an exchange, without a walk over its group.
Traffic exchange_traffic(const Step& step, int64_t position);

// Whether the backend's own collectives carry out the reduction of a layout over some mesh dims; else it is exchanged
// and summed here.
bool reduces_natively(const Layout& layout, MeshDimSet mesh_dims, Backend backend);

// Of one of k ranks that hold as many elements each and keep `kept`; the `index`-th by rank.
Traffic reduce_scatter_traffic(int64_t held, int64_t kept, int64_t k, int64_t item_bytes);
Traffic all_reduce_traffic(int64_t held, int64_t k, int64_t index, int64_t item_bytes, bool native);

// Chunk of a flat range of n elements over k ranks: [index * ceil(n / k), ...).
Interval flat_chunk(int64_t n, int64_t k, int64_t index);

}  // namespace shardwright
