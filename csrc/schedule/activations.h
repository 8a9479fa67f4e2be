// Activations of which ranks keep parts from a forward to its backward (`sw.fsdp.checkpoint_cut`), as events of a step.
//
// A backward needs them one after the other; each is gathered when its turn comes, or one turn ahead. The first turns
// of a backward start before it begins. They lie beside the arena, because autograd decides when it lets go of one.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule/schedule.h"

namespace shardwright {

// When each is gathered, `ahead` turns before its own.
std::vector<ActivationGather> plan_activations(const std::vector<Use>& uses, const std::vector<Activation>& activations,
                                               int64_t ahead);

// By use: the most bytes that gathered activations take at a time.
std::vector<int64_t> activation_bytes(size_t num_uses, const std::vector<Activation>& activations,
                                      const std::vector<ActivationGather>& gathers);

// Throws UserError if they are not those of these uses, in the order of their turns.
void check_activations(const std::vector<Activation>& activations, size_t num_uses);

}  // namespace shardwright
