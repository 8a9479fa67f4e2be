// The figures of a batch's plan, next to what no way of moving the batch can go below.
#pragma once

#include <cstdint>
#include <string>

#include "batch/batch_plan.h"

namespace shardwright {

// Bytes are those of the destinations' dtypes.
struct BatchCertificate {
  int64_t items = 0;
  int64_t kinds = 0;  // of items that are planned alike
  int64_t ranks = 0;

  // Received is also the bound: what a rank needs and does not hold, it must receive.
  int64_t received_bytes_max = 0;
  int64_t received_bytes_sum = 0;
  int64_t kept_bytes_sum = 0;  // copied locally
  int64_t sent_bytes_max = 0;
  // The bytes that the rank that sends most must send if only holders send: the least worst load over all ways to share
  // the sending of all items. With more than kMaxPools sets of holders it is a bound below that, and not exact.
  int64_t sent_bytes_bound = 0;
  bool sent_bound_is_exact = true;

  int64_t rounds = 0;
  int64_t rounds_bound = 0;  // the busiest rank's bytes, sent and received, divided by the bytes of a bucket
  // One from a rank to another in each round in which something goes from one to the other. With more than
  // kMaxItemMessages messages of items of different kinds these are at most so many.
  int64_t messages_max = 0;  // received by one rank
  int64_t messages_sum = 0;
  bool messages_are_exact = true;

  // Of sources with pending reductions, before anything moves: their number, what all ranks receive for it, what the
  // reduced parts take on the rank that has most of them, and what the reduction that needs most memory takes besides,
  // with whatever lowering needs most.
  int64_t reductions = 0;
  int64_t reduction_bytes_sum = 0;
  int64_t reduced_bytes_max = 0;
  int64_t reducing_bytes_max = 0;

  int64_t bucket_bytes = 0;
  int64_t buckets = 0;
  // No rank takes more: buckets * bucket_bytes. With reductions no rank takes more than reduced_bytes_max and the
  // larger of the buckets and reducing_bytes_max.
  int64_t memory_bytes = 0;

  static constexpr int64_t kMaxPools = 4096;
  static constexpr int64_t kMaxItemMessages = int64_t{1} << 20;

  std::string to_string() const;
  std::string to_json() const;
};

BatchCertificate certificate_of(const BatchPlan& plan);

}  // namespace shardwright
