// Exchanges sequence for heads: each rank gives up its rows of other ranks' heads, and gets the rows of all ranks for
// its own share of the heads. Results go back in the same way.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/parts.h"

namespace shardwright {

class HeadExchange {
 public:
  // `sharing` determines each rank's share of the heads.
  HeadExchange(AttentionWriter& writer, HeadSharing sharing);

  const HeadShare& share(int64_t position) const { return shares_[position]; }
  const HeadShare& own_share() const { return shares_[writer_.me]; }

  struct Tensor {
    HeadsTensor local;  // this rank's rows of all heads
    HeadKind kind = HeadKind::kQueries;
  };
  // Gathers this rank's share of the heads of every tensor, for the rows of all ranks, in one transfer, and waits for
  // it.
  void gather(const std::vector<Tensor>& tensors);
  // Gather tensors 0 to 2: q, k, v; or tensors 0 to 5: q, k, v, out, dout, lse.
  void gather(const ForwardTensors& t);
  void gather(const BackwardTensors& t);
  // Returns a copy of this rank's share of a gathered tensor, in which the rows of all ranks follow each other.
  HeadsTensor joined(size_t tensor);
  // Returns the rows of a block in a gathered tensor, beginning with the first head of this rank's share.
  Heads at(size_t tensor, const SequenceBlock& block) const;
  HeadRows rows_at(size_t tensor, const SequenceBlock& block) const;

  // A transfer that returns results. A rank sends the receiver's rows for its own share of the heads, and receives its
  // own rows for the sender's share of the heads.
  struct Sent {
    HeadsTensor share;  // of the receiver's rows
    HeadKind kind = HeadKind::kQueries;
  };
  struct Arriving {
    Ticket ticket = kNoTicket;
    int64_t from = 0;
    std::vector<Sent> shares;  // as many as were sent, in the same order
  };
  // Sends to the rank that is `distance` ahead and receives from the rank that is `distance` behind. All ranks call it.
  Arriving start_transfer(int64_t distance, const std::vector<Sent>& sent);
  // Wait for a transfer, then copy the received heads to their place among all heads, or add them to sums there.
  void copy_to(const std::vector<HeadsTensor>& tensors, const Arriving& arriving);
  void add_to(const std::vector<HeadsTensor>& sums, const Arriving& arriving);

 private:
  // This rank's own rows are not copied: they are read from its local tensor, among all heads.
  HeadsOffset offset_of(size_t tensor, const SequenceBlock& block) const;
  const HeadsTensor& tensor_with(size_t tensor, const SequenceBlock& block) const;

  AttentionWriter& writer_;
  std::vector<HeadShare> shares_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<HeadsTensor>> gathered_;  // by tensor and owner
};

}  // namespace shardwright
