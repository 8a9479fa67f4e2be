// What one rank does in a batch: what stays on it, and for each round what it packs, sends, receives and unpacks.
//
//   for each item of which something stays here: copy it from the source to the destination
//   for each round, with `buckets` rounds under way at a time:
//     pack     the fragments of all sends into the round's bucket, from its beginning; cast them on the way
//     move     one message to and from each peer, each a range of bytes of the bucket
//     unpack   the fragments of all receives from the bucket into the destinations
//
// Fragments follow each other in a message in the order of BatchPlan::order(), on both sides. Tensors may have any
// strides: these are given when boxes are asked for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "batch/batch_plan.h"

namespace shardwright {

// The elements of one item in one message.
struct BatchFragment {
  int item = 0;
  int message = 0;    // index into the rank's messages for items of this kind
  int64_t begin = 0;  // the fragment is this range of the message
  int64_t end = 0;
  int64_t position = 0;  // in the bucket, in elements
};

struct BatchMessage {
  Rank peer{};
  int64_t offset_bytes = 0;  // in the bucket
  int64_t size_bytes = 0;
  std::vector<BatchFragment> fragments;
};

struct BatchRound {
  int number = 0;
  int64_t element_bytes = 1;
  std::vector<BatchMessage> sends;     // by ascending peer
  std::vector<BatchMessage> receives;  // by ascending peer
  int64_t sent_bytes = 0;
  int64_t received_bytes = 0;
};

class BatchProgram {
 public:
  // A rank of none of the meshes has nothing to do.
  BatchProgram(std::shared_ptr<const BatchPlan> plan, Rank rank);

  const BatchPlan& plan() const { return *plan_; }
  Rank rank() const { return rank_; }

  // The rounds in which this rank takes part, ascending.
  const std::vector<BatchRound>& rounds() const { return rounds_; }
  // Items of which something stays on this rank.
  const std::vector<int>& own_items() const { return own_items_; }

  // The index into rounds() of the last one that reads a source or writes a destination; -1 if none does.
  int last_round_of_source(int source) const { return last_of_source_[source]; }
  int last_round_of_destination(int destination) const { return last_of_destination_[destination]; }

  // Boxes between a local tensor with these strides and the bucket, in elements from their beginnings. A destination is
  // the dst of boxes that unpack, a source is the src of boxes that pack.
  std::vector<Box> boxes_to_pack(const BatchFragment& fragment, const std::vector<int64_t>& src_strides) const;
  std::vector<Box> boxes_to_unpack(const BatchFragment& fragment, const std::vector<int64_t>& dst_strides) const;
  // Boxes from the source to the destination of what stays here of an item.
  std::vector<Box> boxes_to_keep(int item, const std::vector<int64_t>& src_strides,
                                 const std::vector<int64_t>& dst_strides) const;

 private:
  // The part of one rank in an exchange.
  struct RankPart {
    std::vector<Exchange::Message> sends;
    std::vector<Exchange::Message> receives;
    std::optional<Selection> kept;  // if there is anything
    std::vector<LocalAxis> src_axes;
    std::vector<LocalAxis> dst_axes;
  };
  class Builder;

  static RankPart part_of(const Exchange& exchange, Rank rank);

  std::shared_ptr<const BatchPlan> plan_;
  Rank rank_;
  std::vector<RankPart> parts_;  // by kind
  std::vector<BatchRound> rounds_;
  std::vector<int> own_items_;
  std::vector<int> last_of_source_;
  std::vector<int> last_of_destination_;
};

}  // namespace shardwright
