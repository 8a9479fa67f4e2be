// The costs of a batch plan, next to lower bounds that hold for every way of moving the batch.
#pragma once

#include <cstdint>
#include <string>

#include "batch/batch_plan.h"

namespace shardwright {

// Fields that end with `_max` are for the rank with the most, with `_sum` for all ranks together. Fields that end with
// `_bound` are lower bounds. Bytes are counted in the dtypes in which elements are sent (wire_dtype in item_family.h).
// Only the fields of reductions and memory_bytes include the reductions of sources; all other fields are about the
// reduced sources.
struct BatchCertificate {
  int64_t items = 0;  // number of items of the batch
  int64_t kinds = 0;  // number of kinds (BatchPlan::kinds())
  int64_t ranks = 0;  // number of ranks of all meshes

  // Received bytes equal their lower bound: a rank must receive what it needs and does not hold.
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t kept_bytes_sum = 0;  // copied locally
  int64_t sent_bytes_max = 0;  // sent by the busiest sender
  // Lower bound on sent_bytes_max if only ranks that hold the data (candidate senders) send: the load of the busiest
  // sender if the sending of all items is divided in the best way.
  int64_t sent_bytes_bound = 0;
  // True if some division reaches the bound. False if that is not known, because a weaker bound was computed: there are
  // more than kMaxPools sets of candidate senders, or some sets are unknown.
  bool sent_bound_is_exact = true;

  int64_t rounds = 0;  // number of rounds
  // Bytes sent and received by the busiest rank, divided by Batch::bucket_bytes and rounded up.
  int64_t rounds_bound = 0;
  // All elements that one rank sends another in one round are one message.
  int64_t messages_max = 0;  // received by one rank
  int64_t messages_sum = 0;  // received by all ranks
  // False if messages_max and messages_sum are only upper bounds. This is the case if the kinds have more than
  // kMaxItemMessages messages, counting one item of each kind.
  bool messages_are_exact = true;

  // Reductions of sources with pending reductions, before anything is sent.
  int64_t reductions = 0;           // number of sources that are reduced
  int64_t reduction_bytes_sum = 0;  // received by all ranks: sum over reductions, each with its largest lowering
  int64_t reduced_bytes_max = 0;    // memory for the results of all reductions
  int64_t reducing_bytes_max = 0;   // temporary memory of one reduction: maximum over reductions and lowerings

  int64_t bucket_bytes = 0;  // BatchPlan::bucket_bytes()
  int64_t buckets = 0;       // BatchPlan::buckets()
  // Extra memory per rank: buckets * bucket_bytes. With reductions it is an upper bound: reduced_bytes_max plus the
  // larger of buckets * bucket_bytes and reducing_bytes_max.
  int64_t memory_bytes = 0;

  static constexpr int64_t kMaxPools = 4096;  // maximum number of sets of candidate senders for an exact bound
  // Maximum number of messages for an exact count: summed over all ranks and kinds, with one item of each kind.
  static constexpr int64_t kMaxItemMessages = int64_t{1} << 20;

  // Returns the certificate as a few lines of text.
  std::string to_string() const;
  // Returns a JSON object with all fields.
  std::string to_json() const;
};

// Returns the costs of a plan and their lower bounds.
BatchCertificate certificate_of(const BatchPlan& plan);

}  // namespace shardwright
