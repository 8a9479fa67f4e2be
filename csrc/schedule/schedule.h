// When weights that are cut between steps are gathered, how long they stay, and when their gradients are reduced.
//
// A training step is a sequence of *uses*: stretches of compute, forward, recomputed or backward, each with the weights
// that it needs whole. A weight may be a group of tensors that are always gathered together. The sequence is known
// before the step begins (it was recorded in an earlier one), so what is prefetched and what is kept follows from it
// and from a budget of memory, without heuristics about modules.
//
// The same arguments give the same schedule on every rank and in every step: what is communicated depends on it.
//
// Example: weights a and b of 100 bytes, used forwards a, b and backwards b, a, with gradients of 100 bytes.
//
//     budget 400 or none    a and b are gathered before use 0 and stay: 2 gathers. The gradient of b is reduced during
//                           the backward of a, so two gradients exist at a time
//     budget 300            the same gathers; the gradient of b is reduced before the backward of a begins
//     budget 200            there is room for one weight: b is gathered after the forward of a, and a again for its
//                           backward: 3 gathers
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

// A product that makes a weight's gradient, or a part of it: each chunk travels while the next one is computed.
struct ReducingProduct {
  int64_t transfer_ps = 0;    // how long all chunks take, one after the other
  int64_t last_chunk_ps = 0;  // how long one takes
  int use = -1;               // -1: the use that completes the gradient; otherwise that one or one before
};

// The reduction of a weight's gradient in chunks, within the uses that make it. A weight whose modules contain
// others makes its gradient in several uses.
struct ChunkedReduction {
  std::vector<ReducingProduct> products = {};  // none: not in chunks
  int64_t rest_ps = 0;         // how long what is not in chunks takes after the last use, such as biases
  int64_t gradient_bytes = 0;  // instead of Weight::gradient_bytes
};

// Bytes are those of one rank, the one with most.
struct Weight {
  std::string name;
  int64_t rest_bytes = 0;  // held all the time; not part of any budget
  int64_t use_bytes = 0;   // gathered
  // The bytes that must stay from the weight's first use to its last: 0 if it may be gathered from rest again,
  // `use_bytes` where it must stay gathered, in between a copy that is cut less than at rest.
  int64_t keep_bytes = 0;
  int64_t gradient_bytes = 0;  // of a backward's gradient before it is reduced; 0 for a frozen weight
  int64_t gather_ps = 0;       // how long a gather takes; 0: not known
  int64_t reduce_ps = 0;       // how long the reduction of a gradient takes; 0: not known
  // If this is another weight, gathered in chunks within its uses (schedule/chunks.h): which one, how long all
  // chunks take, and the first.
  int form_of = -1;
  int64_t chunks_ps = 0;
  int64_t first_chunk_ps = 0;
  ChunkedReduction in_chunks = {};  // in the uses that say so
  // If parts at rest are on the host: how long the copy to the device takes with which a gather from rest begins,
  // and the copy to the host with which a reduction ends.
  int64_t fetch_ps = 0;
  int64_t send_ps = 0;
};

struct Use {
  std::vector<int> weights;  // indices, each once: several where modules with weights contain others
  Pass pass = Pass::kForward;
  std::vector<int> gradients;  // weights whose gradients are complete after this use
  int64_t compute_ps = 0;      // how long the compute of this use takes; 0: not known
  // Of `gradients`, those that are reduced in chunks, within this use or those before (Weight::in_chunks).
  std::vector<int> in_chunks = {};
};

// A tensor that a backward needs whole, and of which a part is kept since a forward.
struct Activation {
  std::string name;
  int64_t kept_bytes = 0;  // of the part; not part of any budget
  int64_t bytes = 0;       // gathered
  int64_t gather_ps = 0;   // how long a gather takes; 0: not known
  int saved = 0;           // the use that makes it
  int first = 0;           // the use that needs it first, which is its turn
  int last = 0;            // and last
  int until = 0;           // the activation in whose turn it is needed last: its own number, or a later one
};

struct ScheduleOptions {
  // For gathered weights, kept copies, and gradients until they are reduced. None: everything stays until its last use.
  std::optional<int64_t> budget_bytes;
  // For how many changes of weights ahead they are gathered, where the budget allows it; a change is a use that needs a
  // weight which the use before does not need. Earlier where times say that the compute until then is shorter than the
  // gathers; 0 gathers at the use alone, whatever times say.
  int64_t prefetch = 1;
  // Of addresses in the arena; a power of two.
  int64_t alignment_bytes = 256;
  // Of the budget, what is in use all the time outside of the arena: whole gradients that steps before have left to add
  // to, and weights that stay gathered between steps.
  int64_t held_bytes = 0;
  // Wishes besides `prefetch`: by use, the last use whose weights are resident or being gathered at this one, as far as
  // the budget allows; below the use itself: no wish. Empty: none at all.
  std::vector<int> gather_until = {};
  // Of the step, in the order of their turns, and how many turns ahead they are gathered.
  std::vector<Activation> activations = {};
  int64_t activations_ahead = 0;
};

// Memory in the arena, from before use `first` until after use `last`.
struct WeightBuffer {
  int weight = 0;
  bool is_kept_copy = false;  // it holds the copy of keep_bytes, not the gathered weight
  int first = 0;
  int last = 0;
  int64_t size_bytes = 0;
  int64_t offset_bytes = 0;
};

struct Gather {
  int weight = 0;
  int buffer = 0;          // index
  int start = 0;           // starts before this use
  int needed = 0;          // done before this use
  bool from_copy = false;  // from the kept copy instead of from rest
};

// One at a time for each weight.
struct Reduction {
  int weight = 0;
  int first = 0;           // the gradient exists from this use on: the first backward use since the reduction before
  int start = 0;           // starts after this use
  int finish = 0;          // done after this use; the gradient is released then. At `start`, nothing is overlapped
  bool in_chunks = false;  // all but the rest of it was done within uses up to `start`
};

struct ActivationGather {
  int start = 0;     // starts within this use,
  int trigger = -1;  // in the turn of this activation; -1: before the use
};

// The part of a weight's gradient that the products within a use reduce.
struct ReducedWithin {
  int weight = 0;
  int64_t transfer_ps = 0;
  int64_t last_chunk_ps = 0;
};

// Lists are in the order in which things happen.
struct StepSchedule {
  std::vector<Weight> weights;
  std::vector<Use> uses;
  ScheduleOptions options;

  std::vector<WeightBuffer> buffers;
  std::vector<Gather> gathers;
  std::vector<Reduction> reductions;
  std::vector<ActivationGather> activation_gathers = {};  // as in the options

  int64_t arena_bytes = 0;            // one arena holds all buffers
  int64_t live_buffer_bytes = 0;      // the most that buffers take at one use: what no arena can go below
  int64_t peak_gradient_bytes = 0;    // the most that gradients take at one use
  int64_t peak_activation_bytes = 0;  // the most that gathered activations take at a time
  int64_t peak_beside_bytes = 0;      // the most that both take at one use, beside the arena
  int64_t peak_bytes() const { return arena_bytes + peak_beside_bytes + options.held_bytes; }

  // By use: indices of the gathers that start before it, of the buffers that are released after it, of the reductions
  // that start after it, and of those that are waited for after it.
  std::vector<int> gathers_before(int use) const;
  std::vector<int> released_after(int use) const;
  std::vector<int> reductions_started_after(int use) const;
  std::vector<int> reductions_finished_after(int use) const;
  // The forms of weights whose chunks are gathered within this use. Of several uses in one pass that follow each other,
  // it is the longest, where the product is taken to be; of equally long ones the first. A form that stays from one
  // pass to another is gathered in chunks in both.
  std::vector<int> gathered_within(int use) const;
  std::vector<ReducedWithin> reduced_within(int use) const;
};

// Plans a step.
//
//   1. A reduction starts after the use that completes the gradient, or within it in chunks. It is waited for after the
//      next change of weights, so that it runs alongside the next backward, or at once, which takes less memory.
//   2. At each use its weights are resident. Those of the uses that follow are too, or are being gathered: as far ahead
//      as wanted, as long as they fit at every use until theirs. Whatever else is resident stays if it fits. If not,
//      what is used latest goes first, and is released right after its use before. For weights of one size no other
//      choice has fewer gathers (Belady).
//   3. Buffers get their addresses. If the arena is larger than the budget because of gaps, the step is planned again
//      with less.
//   4. With a budget, both answers to 1. are planned. The one with fewer bytes is taken: those of all gathers, and once
//      more those of gathers and reductions that nothing is computed alongside.
//
// Throws UserError: a use of an unknown weight or of one twice, negative figures, keep_bytes above use_bytes, wishes
// for uses that do not exist, or a budget that is too small; then the text names one that is not. For weights of one
// size it is the least.
StepSchedule make_schedule(std::vector<Weight> weights, std::vector<Use> uses, const ScheduleOptions& options);

// The number of changes ahead that `fastest_schedule` tries.
constexpr int64_t kMostChangesAhead = 8;

// The schedule with the least `prefetch`, from 1 on, whose predicted time (schedule/lanes.h) is within 1% of the
// shortest within the budget. Without times, `prefetch` is 1. `options.prefetch` is not read. Throws as `make_schedule`
// does.
StepSchedule fastest_schedule(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                              const ScheduleOptions& options);

// The number of turns ahead that activations are gathered within the budget: one if some plan with that fits, with
// weights gathered at their uses, and `prefetch` is not 0. It does not depend on times, which ranks of other meshes may
// not share.
int64_t activations_ahead_within(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                 const ScheduleOptions& options);

// The least budget with which gathers are as far ahead as wanted and reductions run alongside the next backward.
int64_t overlapping_budget_bytes(const std::vector<Weight>& weights, const std::vector<Use>& uses,
                                 const ScheduleOptions& options);

// A line for each use, the peak, each buffer's place in the arena and, with times, the predicted lanes. JSON holds the
// same and the arguments.
std::string to_text(const StepSchedule& schedule);
std::string to_json(const StepSchedule& schedule);

}  // namespace shardwright
