// Exchanges sequence for heads. Before, each rank holds its own rows of all heads; afterwards, the rows of all ranks
// for its own share of the heads. Results are sent back in the other direction.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/parts.h"

namespace shardwright {

class HeadExchange {
 public:
  // `sharing` determines each rank's share of the heads.
  HeadExchange(AttentionWriter& writer, HeadSharing sharing);

  // Return the share of the heads of the rank at `position`, and of this rank.
  const HeadShare& share(int64_t position) const { return shares_[position]; }
  const HeadShare& own_share() const { return shares_[writer_.me]; }

  // A tensor to gather.
  struct Tensor {
    HeadsTensor local;  // this rank's rows of all heads
    HeadKind kind = HeadKind::kQueries;
  };
  // Emits one transfer that gathers this rank's share of the heads of every tensor, for the rows of all ranks, and a
  // wait for it. Other methods refer to a gathered tensor by its index in `tensors`. A later call replaces the tensors.
  void gather(const std::vector<Tensor>& tensors);
  // Gather q, k, v (tensors 0 to 2), or q, k, v, out, dout, lse (tensors 0 to 5).
  void gather(const ForwardTensors& t);
  void gather(const BackwardTensors& t);
  // Emits a copy of a gathered tensor to one new tensor [batch, this rank's heads, rows of all ranks, depth], with
  // rows by ascending position, and returns the new tensor.
  HeadsTensor joined(size_t tensor);
  // Return the rows of a block of any rank in a gathered tensor, beginning with the first head of this rank's share;
  // rows_at is for an lse.
  Heads at(size_t tensor, const SequenceBlock& block) const;
  HeadRows rows_at(size_t tensor, const SequenceBlock& block) const;

  // A result (or gradient) for the sender's share of the heads and the receiver's rows.
  struct Result {
    HeadsTensor tensor;
    HeadKind kind = HeadKind::kQueries;
  };
  // A transfer that sends results to one rank and receives results from another rank.
  struct ResultTransfer {
    Ticket ticket = kNoTicket;
    int64_t from = 0;              // position of the sender
    std::vector<Result> received;  // one for each sent result, in the same order
  };
  // Emits a transfer that sends to the rank `distance` ahead and receives from the rank `distance` behind. All ranks
  // must call it. The ticket is kNoTicket if this rank neither sends nor receives.
  ResultTransfer start_transfer(int64_t distance, const std::vector<Result>& sent);
  // Emit a wait for a transfer, then copies of its received results to their heads of `tensors`, or additions to their
  // heads of `sums`. `tensors` and `sums` have this rank's rows of all heads, one tensor per result.
  void copy_to(const std::vector<HeadsTensor>& tensors, const ResultTransfer& transfer);
  void add_to(const std::vector<HeadsTensor>& sums, const ResultTransfer& transfer);

 private:
  // Return the first head and row of a block in tensor_with(), and the tensor that has the block's rows of this rank's
  // share of the heads. This rank's own rows are not copied: they are read from its local tensor, which has all heads.
  HeadsOffset offset_of(size_t tensor, const SequenceBlock& block) const;
  const HeadsTensor& tensor_with(size_t tensor, const SequenceBlock& block) const;

  AttentionWriter& writer_;
  std::vector<HeadShare> shares_;  // by position
  std::vector<Tensor> tensors_;
  std::vector<std::vector<HeadsTensor>> gathered_;  // by tensor, then by the position that the rows came from
};

}  // namespace shardwright
