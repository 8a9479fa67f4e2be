// The messages of a group whose replicas share the sending.
//
// The elements that the receivers need of a part are arranged in a queue by receiver position, and every replica of the
// part sends one range of the queue. All ranges of a group have the same length, the least that covers every queue:
// shorter ranges would split more messages without relieving the busiest rank.
//
// Example: 12 rows on (a=2, b=2) move from [S(0), R] to [R, S(0)]. Ranks 0 and 1 hold rows 0 to 5. Of ranks 2 and 3,
// only rank 2 needs these rows.
//
//   kWholeMessages    rank 0 sends rows 0 to 5 to rank 2
//   kEvenBytes        rank 0 sends rows 0 to 2 to rank 2, and rank 1 sends rows 3 to 5 to rank 2
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "exchange/replica_policy.h"
#include "layout/layout.h"

namespace shardwright {

class SharedSending {
 public:
  // `group` has the positions of all members of one group. The policy must be kWholeMessages or kEvenBytes.
  SharedSending(const Layout& before, const Layout& after, MeshDimSet group_dims, ReplicaPolicy policy,
                const std::vector<int64_t>& group);

  // Returns the message from the `from`-th member to the `to`-th, as a range of the common elements in packed order;
  // [0, 0) if there is none, also if `to` holds the sender's part itself.
  Interval range(size_t from, size_t to) const;

 private:
  ReplicaPolicy policy_;
  std::vector<size_t> part_;           // by member: the first member that holds the same part
  std::vector<int64_t> sender_index_;  // by member: its index among the members that hold the same part
  // The beginning of a receiver's section of a queue: the number of elements before it, and of receivers.
  struct Offset {
    int64_t elements = 0;
    int64_t receivers = 0;
  };
  std::vector<std::vector<Offset>> queue_;  // by part and receiver; the last entry of a part is the end of its queue
  Offset quota_;  // length of a range: in elements with kEvenBytes, in receivers with kWholeMessages
};

}  // namespace shardwright
