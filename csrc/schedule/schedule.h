// Decides when sharded weights are gathered, how long they stay gathered, and when their gradients are reduced.
//
// A training step is a sequence of *uses*: ranges of compute (forward, recomputed or backward), each with the weights
// that it needs unsharded. A weight may be a group of tensors that are always gathered together. The sequence is known
// before the step begins, because it was recorded in an earlier step. So it and a memory budget determine what is
// prefetched and kept, without heuristics about modules.
//
// The same arguments give the same schedule on every rank and in every step, because communication depends on it.
// Durations are in picoseconds (`_ps`).
//
// Terms: a *resident* weight is gathered, in a buffer of the arena. A *kept copy* is a copy of a weight that is sharded
// over fewer ranks than the weight; later gathers read from it. A transfer *in chunks* is divided, and runs within the
// use that needs or computes its data (schedule/chunks.h). A *weight change* is a use that needs a weight which the use
// before does not need. The *turn* of an activation is the part of a backward that needs it (schedule/activations.h).
//
// Example: weights a and b of 100 bytes, forward uses of a, b and backward uses of b, a, gradients of 100 bytes.
//
//     budget 400 or none    a and b are gathered before use 0 and stay: 2 gathers. The gradient of b is reduced during
//                           the backward of a, so two gradients exist at a time
//     budget 300            the same gathers; the gradient of b is reduced before the backward of a begins
//     budget 200            one weight fits: b is gathered after the forward of a, and a again for its backward:
//                           3 gathers
//     budget below 200      an error
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace shardwright {

enum class Pass : uint8_t { kForward, kRecompute, kBackward };

const char* pass_name(Pass pass);          // "forward", "recompute", "backward"
Pass parse_pass(const std::string& name);  // throws UserError

// A matrix product that computes a weight's gradient, or a part of it, in chunks. Each chunk is sent to be reduced
// while the next one is computed.
struct ReducingProduct {
  int64_t transfer_ps = 0;    // duration of the transfers of all chunks, one after the other
  int64_t last_chunk_ps = 0;  // duration of the transfer of one chunk
  int use = -1;               // use of the product; -1: the use that completes the gradient
};

// The reduction of a weight's gradient in chunks, within the uses that compute it. If a module contains other modules,
// the gradient of its own weight is computed in several uses.
struct ChunkedReduction {
  std::vector<ReducingProduct> products = {};  // empty: not in chunks
  int64_t rest_ps = 0;  // duration of reducing the parts that are not in chunks, such as biases, after the last use
  int64_t gradient_bytes = 0;  // bytes of the gradient if it is reduced in chunks, instead of Weight::gradient_bytes
};

// A weight, or a group of tensors that are gathered together. All numbers of bytes are the maximum over ranks.
struct Weight {
  std::string name;
  int64_t rest_bytes = 0;  // of the sharded part, which is always held; not part of any budget
  int64_t use_bytes = 0;   // of the gathered weight
  // Bytes that must stay from the weight's first use to its last. 0: none, because the weight may be gathered again
  // from the sharded parts. Equal to `use_bytes`: the weight must stay gathered. In between: the size of its kept copy.
  int64_t keep_bytes = 0;
  int64_t gradient_bytes = 0;  // unreduced gradient of one backward; 0 for a frozen weight
  int64_t gather_ps = 0;       // duration of a gather; 0 if unknown
  int64_t reduce_ps = 0;       // duration of the reduction of a gradient; 0 if unknown
  // Set only for a chunked weight: an additional weight that stands for its original in uses that gather it in chunks
  // (schedule/chunks.h).
  int original = -1;                // index of the original; -1: not a chunked weight
  int64_t chunks_ps = 0;            // duration of the transfers of all chunks
  int64_t first_chunk_ps = 0;       // duration of the transfer of the first chunk
  ChunkedReduction in_chunks = {};  // how uses with this weight in Use::in_chunks reduce its gradient
  // Set only if sharded parts are offloaded to the host.
  int64_t fetch_ps = 0;  // duration of the copy to the device that begins a gather from sharded parts
  int64_t send_ps = 0;   // duration of the copy to the host that follows a reduction
};

// A range of compute.
struct Use {
  std::vector<int> weights;  // indices of the weights it needs, each once; several if modules are nested
  Pass pass = Pass::kForward;
  std::vector<int> gradients;  // weights whose gradients are complete after this use
  int64_t compute_ps = 0;      // duration of the compute; 0 if unknown
  // The subset of `gradients` that is reduced in chunks, within this use or earlier ones (Weight::in_chunks).
  std::vector<int> in_chunks = {};
};

// A tensor that a backward needs in full, and of which each rank keeps a part since a forward. Uses are given by index.
struct Activation {
  std::string name;
  int64_t kept_bytes = 0;  // kept part; not part of any budget
  int64_t bytes = 0;       // gathered tensor
  int64_t gather_ps = 0;   // duration of a gather; 0 if unknown
  int saved = 0;           // use that computes it
  int first = 0;           // first use that needs it, in which its turn begins
  int last = 0;            // last use that needs it
  int until = 0;           // index of the activation in whose turn this one is needed last: itself or a later one
};

struct ScheduleOptions {
  // Memory limit for gathered weights, kept copies, gathered activations, gradients until they are reduced, and
  // `held_bytes`. nullopt: no limit, so all weights stay gathered until their last use.
  std::optional<int64_t> budget_bytes;
  // Number of weight changes by which gathers are ahead of their uses, if the budget allows it. 0: a gather starts
  // right before the use that needs it.
  int64_t prefetch = 1;
  // Alignment of addresses in the arena; a power of two.
  int64_t alignment_bytes = 256;
  // Part of the budget that is always in use outside of the arena: unsharded gradients of earlier steps that are
  // accumulated, and weights that stay gathered between steps.
  int64_t held_bytes = 0;
  // Makes gathers start earlier than `prefetch` does, if the budget allows it. By use: the index of the last use whose
  // weights should be resident or being gathered at this use. An index below the use itself has no effect. Empty: only
  // `prefetch` counts.
  std::vector<int> gather_until = {};
  // Activations of the step in the order of their turns, and the number of turns by which their gathers are ahead.
  std::vector<Activation> activations = {};
  int64_t activations_ahead = 0;
};

// A range of the arena that is in use from before use `first` until after use `last`.
struct WeightBuffer {
  int weight = 0;             // index of the weight
  bool is_kept_copy = false;  // holds the copy of keep_bytes, not the gathered weight
  int first = 0;
  int last = 0;
  int64_t size_bytes = 0;
  int64_t offset_bytes = 0;
};

// A gather of a weight into a buffer. It starts right before use `start`, and use `needed` waits for it.
struct Gather {
  int weight = 0;
  int buffer = 0;          // index of the WeightBuffer
  int start = 0;           // index of a use
  int needed = 0;          // index of a use
  bool from_copy = false;  // from the kept copy instead of the sharded parts
};

// The reduction of a gradient. Uses are given by index. A weight has at most one reduction at a time. If `finish` is
// `start`, the transfer after this use overlaps no compute.
struct Reduction {
  int weight = 0;
  int first = 0;           // use from which on the gradient exists: the first backward use since the last reduction
  int start = 0;           // use after which the reduction starts
  int finish = 0;          // use after which it is waited for and the gradient released
  bool in_chunks = false;  // true: chunks are reduced within uses up to `start`, and only the rest starts after it
};

// The start of an activation's gather: at the beginning of the turn of activation `trigger`, within use `start`.
struct ActivationGather {
  int start = 0;     // index of a use
  int trigger = -1;  // index of an activation; -1: before the use begins
};

// The part of a weight's gradient that is reduced by the products of one use.
struct ReducedWithin {
  int weight = 0;
  int64_t transfer_ps = 0;    // sum over the products
  int64_t last_chunk_ps = 0;  // maximum over the products
};

// A planned step. Lists are in the order of events.
struct StepSchedule {
  std::vector<Weight> weights;
  std::vector<Use> uses;
  ScheduleOptions options;

  std::vector<WeightBuffer> buffers;
  std::vector<Gather> gathers;
  std::vector<Reduction> reductions;
  std::vector<ActivationGather> activation_gathers = {};  // by activation, as in options.activations

  int64_t arena_bytes = 0;            // size of the arena, which holds all buffers
  int64_t live_buffer_bytes = 0;      // most bytes of buffers at one use, a lower bound on arena_bytes
  int64_t peak_gradient_bytes = 0;    // most bytes of gradients at one use
  int64_t peak_activation_bytes = 0;  // most bytes of gathered activations at a time
  int64_t peak_outside_bytes = 0;     // most bytes outside of the arena (gradients and activations) at one use
  int64_t peak_bytes() const { return arena_bytes + peak_outside_bytes + options.held_bytes; }

  // Return indices into the lists above: of gathers that start right before a use, of buffers released right after it,
  // of reductions that start right after it, and of reductions that are waited for right after it.
  std::vector<int> gathers_before(int use) const;
  std::vector<int> released_after(int use) const;
  std::vector<int> reductions_started_after(int use) const;
  std::vector<int> reductions_finished_after(int use) const;
  // Returns the indices of the chunked weights whose chunks are gathered within this use. If a chunked weight has
  // several consecutive uses in one pass, the longest of them gathers the chunks (the first of equally long ones),
  // because its product is assumed to be there. A chunked weight that stays resident from one pass to another is
  // gathered in chunks in both passes.
  std::vector<int> gathered_within(int use) const;
  // Returns the gradients that are reduced in chunks within this use, in the order of reductions.
  std::vector<ReducedWithin> reduced_within(int use) const;
};

// Plans a step.
//
//   1. A reduction starts after the use that completes the gradient, or within this use in chunks. It is waited for
//      after the next weight change, so that it runs alongside the next backward, or at once, which takes less memory.
//   2. At each use its weights are resident. Weights of the following uses are resident or being gathered too: as far
//      ahead as `prefetch` and `gather_until` require, if they fit at every use until their own. Other resident weights
//      stay if they fit. Otherwise the weight whose next use is latest is evicted first, and released right after its
//      previous use. For weights of one size no other choice has fewer gathers (Belady).
//   3. Buffers get their addresses. If gaps make the arena larger than the budget, the step is planned again with a
//      lower limit.
//   4. With a budget, both variants of 1. are planned. The variant with the lower cost is taken. The cost is the bytes
//      of all gathers (twice for a gather that overlaps no compute) plus the bytes of reductions that overlap no
//      compute.
//
// Throws UserError on invalid arguments (unknown or repeated weights, uses that do not exist, negative values,
// keep_bytes above use_bytes, and others that the message names), or if the budget is too small. The message about the
// budget names a budget that suffices; for weights of one size it is the least that does.
StepSchedule make_schedule(std::vector<Weight> weights, std::vector<Use> uses, const ScheduleOptions& options);

constexpr int64_t kMostChangesAhead = 8;  // largest `prefetch` that fastest_schedule tries

// Plans a step with each `prefetch` from 1 to kMostChangesAhead. Returns the schedule with the least `prefetch` whose
// predicted time (schedule/lanes.h) is within 1% of the shortest. Without times, `prefetch` is 1. `options.prefetch` is
// not read. Throws as `make_schedule` does.
StepSchedule fastest_schedule(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                              const ScheduleOptions& options);

// Returns the number of turns by which gathers of activations can be ahead within the budget, 1 or 0. It is 1 if there
// are activations, `prefetch` is not 0, and a plan with activations one turn ahead and weights gathered at their uses
// fits. It is 0 also if that plan has invalid arguments. It does not depend on times, which may differ between ranks
// of different meshes.
int64_t activations_ahead_within(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                 const ScheduleOptions& options);

// Returns the least budget with which gathers are as far ahead as `prefetch` and `gather_until` require, and reductions
// run alongside the next backward. options.budget_bytes does not matter. Throws UserError on invalid arguments.
int64_t overlapping_budget_bytes(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                 const ScheduleOptions& options);

// Return the schedule as text and as JSON. The text has a line for each use, the peak, each buffer's range of the arena
// and, with times, the predicted lanes. JSON has all lists, the main arguments and the predicted time. A changed or
// added field raises its "version".
std::string to_text(const StepSchedule& schedule);
std::string to_json(const StepSchedule& schedule);

}  // namespace shardwright
