// The costs of a batch plan, next to lower bounds that hold for every way of moving the batch.
#pragma once

#include <cstdint>
#include <string>

#include "batch/batch_plan.h"

namespace shardwright {

// Bytes are counted in the dtypes in which elements are sent (wire_dtype in item_family.h).
struct BatchCertificate {
  int64_t items = 0;
  int64_t kinds = 0;  // number of BatchPlan::kinds()
  int64_t ranks = 0;

  // Received bytes equal their lower bound: a rank must receive what it needs and does not hold.
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t kept_bytes_sum = 0;  // copied locally
  int64_t sent_bytes_max = 0;
  // Lower bound on sent_bytes_max if only ranks that hold the data (candidate senders) send: the best balance of the
  // sending of all items. With more than kMaxPools sets of candidate senders, or if some sets are unknown, it is a
  // weaker bound and not exact.
  int64_t sent_bytes_bound = 0;
  bool sent_bound_is_exact = true;

  int64_t rounds = 0;
  int64_t rounds_bound = 0;  // bytes sent and received by the busiest rank, divided by the bucket size
  // Messages: one for each round and each pair of ranks that communicate in it. These are upper bounds if there are
  // more than kMaxItemMessages messages of items of different kinds.
  int64_t messages_max = 0;  // received by one rank
  int64_t messages_sum = 0;
  bool messages_are_exact = true;

  // Reductions of sources with pending reductions, before anything is sent.
  int64_t reductions = 0;           // number of sources
  int64_t reduction_bytes_sum = 0;  // received by all ranks for the reductions
  int64_t reduced_bytes_max = 0;    // reduced parts on the rank that holds most of them
  int64_t reducing_bytes_max = 0;   // most temporary memory of one reduction, with the lowering that needs most

  int64_t bucket_bytes = 0;
  int64_t buckets = 0;
  // Extra memory per rank: buckets * bucket_bytes. With reductions it is an upper bound: reduced_bytes_max plus the
  // larger of buckets * bucket_bytes and reducing_bytes_max.
  int64_t memory_bytes = 0;

  static constexpr int64_t kMaxPools = 4096;
  static constexpr int64_t kMaxItemMessages = int64_t{1} << 20;

  std::string to_string() const;
  std::string to_json() const;
};

BatchCertificate certificate_of(const BatchPlan& plan);

}  // namespace shardwright
