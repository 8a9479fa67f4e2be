// The exchange of a step: the elements that each rank sends to each peer (exchange/exchange.h).
#pragma once

#include <memory>

#include "exchange/exchange.h"
#include "exchange/grid_exchange.h"
#include "exchange/mesh_exchange.h"
#include "moves/step.h"

namespace shardwright {

// Returns the exchange of a step; in that of a local step, no rank sends anything. Throws InvariantError if the step
// reduces. The step must outlive the exchange.
std::unique_ptr<const Exchange> exchange_of(const Step& step);

// Returns the exchange of a crossing. Throws InvariantError if the policy of the step is kAligned, or if a layout has
// pending reductions.
GridExchange crossing_of(const Step& step);

// Returns the exchange within the groups of a step on one mesh. For a reduction, it has the parts that ranks hold
// before and need after. The step must outlive the exchange.
MeshExchange mesh_exchange_of(const Step& step);

}  // namespace shardwright
