// Exchanges between parts of the sequence with all heads and the whole sequence with a share of the heads.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/parts.h"

namespace shardwright {

class HeadExchange {
 public:
  // Shares as HeadSharing says.
  HeadExchange(AttentionWriter& writer, HeadSharing sharing);

  const HeadShare& share(int64_t position) const { return shares_[position]; }
  const HeadShare& mine() const { return shares_[writer_.me]; }

  struct Tensor {
    HeadsTensor local;  // this rank's rows of all heads
    HeadKind kind = HeadKind::kQueries;
  };
  // Gathers the rows of all ranks of this rank's share of the heads of every tensor, in one transfer, and waits for it.
  void gather(const std::vector<Tensor>& tensors);
  // The same for q, k and v; and for these, out, dout and lse.
  void gather(const ForwardTensors& t);
  void gather(const BackwardTensors& t);
  // Copies of this rank's share of the i-th tensor: the rows of all ranks, one after the other.
  HeadsTensor joined(size_t tensor);
  // The rows of a block, from the first head of this rank's share of the i-th tensor on.
  Heads at(size_t tensor, const SequenceBlock& block) const;
  HeadRows rows_at(size_t tensor, const SequenceBlock& block) const;

  // A transfer of results under way: this rank's share of the heads of one rank's rows goes to that rank, and another
  // rank's share of the heads of this rank's rows comes.
  struct Sent {
    HeadsTensor share;  // of the receiver's rows
    HeadKind kind = HeadKind::kQueries;
  };
  struct Arriving {
    Ticket ticket = kNoTicket;
    int64_t from = 0;
    std::vector<Sent> shares;  // one for each that was sent
  };
  // On all ranks: sends to the rank that is `distance` ahead, and receives from the one behind.
  Arriving start_return(int64_t distance, const std::vector<Sent>& sent);
  // Wait for a transfer, and copy what came to where it belongs among all heads, or add it to sums there.
  void copy_to(const std::vector<HeadsTensor>& tensors, const Arriving& arriving);
  void add_to(const std::vector<HeadsTensor>& sums, const Arriving& arriving);

 private:
  // This rank's own rows stay where they are, among those of all heads.
  HeadsPlace place_of(size_t tensor, const SequenceBlock& block) const;
  const HeadsTensor& tensor_with(size_t tensor, const SequenceBlock& block) const;

  AttentionWriter& writer_;
  std::vector<HeadShare> shares_;
  std::vector<Tensor> tensors_;
  std::vector<std::vector<HeadsTensor>> gathered_;  // by tensor and owner
};

}  // namespace shardwright
