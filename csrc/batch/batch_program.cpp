#include "batch/batch_program.h"

#include <algorithm>
#include <map>
#include <utility>

#include "support/error.h"

namespace shardwright {

// Collects the fragments of all rounds.
class BatchProgram::Builder {
 public:
  explicit Builder(const BatchPlan& plan) : plan_(plan), rounds_(plan.num_rounds()) {}

  void add(int item, const RankPart& part) {
    for (const ItemPiece& piece : plan_.pieces(item)) {
      Round& round = rounds_[piece.round];
      round.element_bytes = plan_.wire_dtype(item).size_bytes();
      add(item, piece, part.sends, round.sends);
      add(item, piece, part.receives, round.receives);
    }
  }

  // Returns the rounds in which there is something.
  std::vector<BatchRound> finish() {
    std::vector<BatchRound> rounds;
    for (size_t r = 0; r < rounds_.size(); ++r) {
      Round& round = rounds_[r];
      if (round.sends.empty() && round.receives.empty()) continue;
      BatchRound made;
      made.number = static_cast<int>(r);
      made.element_bytes = round.element_bytes;
      made.sends = placed(round.sends, 0, round.element_bytes, made.sent_bytes);
      made.receives = placed(round.receives, made.sent_bytes, round.element_bytes, made.received_bytes);
      check_invariant(made.sent_bytes + made.received_bytes <= plan_.bucket_bytes(), "round ", r, " packs ",
                      made.sent_bytes, " and ", made.received_bytes, " bytes into buckets of ", plan_.bucket_bytes());
      rounds.push_back(std::move(made));
    }
    return rounds;
  }

 private:
  using Messages = std::map<Rank, std::vector<BatchFragment>>;
  struct Round {
    int64_t element_bytes = 1;
    Messages sends;
    Messages receives;
  };

  static void add(int item, const ItemPiece& piece, const std::vector<Exchange::Message>& all, Messages& messages) {
    for (size_t m = 0; m < all.size(); ++m) {
      const int64_t elements = all[m].elements.count();
      const int64_t begin = ItemPiece::before(piece.begin, elements);
      const int64_t end = ItemPiece::before(piece.end, elements);
      if (begin < end) messages[all[m].peer].push_back({item, static_cast<int>(m), begin, end, 0});
    }
  }

  static std::vector<BatchMessage> placed(Messages& messages, int64_t offset_bytes, int64_t element_bytes,
                                          int64_t& all_bytes) {
    std::vector<BatchMessage> made;
    for (auto& [peer, fragments] : messages) {
      BatchMessage message{peer, offset_bytes + all_bytes, 0, std::move(fragments)};
      for (BatchFragment& fragment : message.fragments) {
        fragment.position = (message.offset_bytes + message.size_bytes) / element_bytes;
        message.size_bytes += (fragment.end - fragment.begin) * element_bytes;
      }
      all_bytes += message.size_bytes;
      made.push_back(std::move(message));
    }
    return made;
  }

  const BatchPlan& plan_;
  std::vector<Round> rounds_;
};

BatchProgram::RankPart BatchProgram::part_of(const Exchange& exchange, Rank rank) {
  RankPart part{exchange.messages(rank, Direction::kSend),
                exchange.messages(rank, Direction::kReceive),
                exchange.kept(rank),
                {},
                {}};
  if (part.kept && part.kept->count() == 0) part.kept = std::nullopt;
  if (!part.sends.empty() || part.kept) part.src_axes = exchange.local_axes(rank, Direction::kSend);
  if (!part.receives.empty() || part.kept) part.dst_axes = exchange.local_axes(rank, Direction::kReceive);
  return part;
}

BatchProgram::BatchProgram(std::shared_ptr<const BatchPlan> plan, Rank rank)
    : plan_(std::move(plan)),
      rank_(rank),
      last_of_source_(plan_->batch().sources.size(), -1),
      last_of_destination_(plan_->batch().destinations.size(), -1) {
  for (const BatchPlan::Kind& kind : plan_->kinds()) parts_.push_back(part_of(*kind.exchange, rank_));
  Builder builder(*plan_);
  for (const int item : plan_->order()) {
    const RankPart& part = parts_[plan_->kind_of(item)];
    if (part.kept) own_items_.push_back(item);
    if (!part.sends.empty() || !part.receives.empty()) builder.add(item, part);
  }
  rounds_ = builder.finish();
  for (size_t r = 0; r < rounds_.size(); ++r) {
    for (const BatchMessage& message : rounds_[r].sends) {
      for (const BatchFragment& fragment : message.fragments) {
        last_of_source_[plan_->batch().items[fragment.item].source] = static_cast<int>(r);
      }
    }
    for (const BatchMessage& message : rounds_[r].receives) {
      for (const BatchFragment& fragment : message.fragments) {
        last_of_destination_[plan_->batch().items[fragment.item].destination] = static_cast<int>(r);
      }
    }
  }
}

std::vector<Box> BatchProgram::boxes_to_pack(const BatchFragment& fragment,
                                             const std::vector<int64_t>& src_strides) const {
  const RankPart& part = parts_[plan_->kind_of(fragment.item)];
  const Selection elements = part.sends[fragment.message].elements.slice(fragment.begin, fragment.end);
  return elements.boxes(Place::strided(part.src_axes, src_strides), Place::packed(fragment.position));
}

std::vector<Box> BatchProgram::boxes_to_unpack(const BatchFragment& fragment,
                                               const std::vector<int64_t>& dst_strides) const {
  const RankPart& part = parts_[plan_->kind_of(fragment.item)];
  const Selection elements = part.receives[fragment.message].elements.slice(fragment.begin, fragment.end);
  return elements.boxes(Place::packed(fragment.position), Place::strided(part.dst_axes, dst_strides));
}

std::vector<Box> BatchProgram::boxes_to_keep(int item, const std::vector<int64_t>& src_strides,
                                             const std::vector<int64_t>& dst_strides) const {
  const RankPart& part = parts_[plan_->kind_of(item)];
  return part.kept->boxes(Place::strided(part.src_axes, src_strides), Place::strided(part.dst_axes, dst_strides));
}

}  // namespace shardwright
