// Plans the gathers of activations that are kept sharded from forward to backward (`sw.fsdp.checkpoint_cut`).
//
// A backward needs its activations one after the other. The *turn* of an activation begins when it is first needed and
// ends when the next activation is first needed. An activation is gathered when its turn begins, or one or more turns
// earlier. If there are not enough earlier turns in its backward, its gather starts before the backward begins.
// Gathered activations are not in the arena, because autograd decides when they are freed.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace shardwright {

// Returns, for each activation, the start of its gather: `ahead` turns before its own turn. Example: uses 0 to 2 are
// forwards, 3 to 5 backwards; activation 0 is first needed in use 3, activation 1 in use 4.
//
//   ahead = 0   0: in its turn, in use 3   1: in its turn, in use 4
//   ahead = 1   0: before use 3            1: in the turn of activation 0, in use 3
std::vector<ActivationGather> plan_activations(const std::vector<Use>& uses, const std::vector<Activation>& activations,
                                               int64_t ahead);

// Returns the maximum bytes of gathered activations during each use. `gathers` has one item per activation.
std::vector<int64_t> activation_bytes(size_t num_uses, const std::vector<Activation>& activations,
                                      const std::vector<ActivationGather>& gathers);

// Throws UserError if a number of bytes or a time is negative, if a use or an `until` does not exist or is out of
// order, or if activations are not in the order of their turns.
void check_activations(const std::vector<Activation>& activations, size_t num_uses);

}  // namespace shardwright
