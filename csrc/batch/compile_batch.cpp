#include "batch/compile_batch.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <tuple>
#include <utility>

#include "program/builder.h"
#include "support/error.h"

namespace shardwright {
namespace {

// One rank's messages and local copies in an exchange.
struct RankPart {
  std::vector<Exchange::Message> sends;
  std::vector<Exchange::Message> receives;
  std::optional<Selection> kept;    // nullopt if nothing stays on the rank
  std::vector<LocalAxis> src_axes;  // places of the axes in the local source; empty if the rank sends and keeps nothing
  std::vector<LocalAxis> dst_axes;  // places of the axes in the local destination; empty if nothing is written there
};

// Returns a rank's part of an exchange.
RankPart part_of(const Exchange& exchange, Rank rank) {
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

// The elements [begin, end) of a message of one item.
struct Fragment {
  int item = 0;
  const Selection* message = nullptr;  // all elements of the message
  int64_t begin = 0;
  int64_t end = 0;
};

// Returns the number of elements of all fragments.
int64_t elements_of(const std::vector<Fragment>& fragments) {
  return std::transform_reduce(fragments.begin(), fragments.end(), int64_t{0}, std::plus<>(),
                               [](const Fragment& fragment) { return fragment.end - fragment.begin; });
}

// The messages between this rank and each peer in one round.
struct Round {
  using Messages = std::map<Rank, std::vector<Fragment>>;  // by peer: the fragments of the message, in their order

  int64_t element_bytes = 1;  // all elements of a round have the same size
  Messages sends;
  Messages receives;

  int64_t sent_bytes() const { return bytes_of(sends); }
  int64_t size_bytes() const { return bytes_of(sends) + bytes_of(receives); }

 private:
  int64_t bytes_of(const Messages& messages) const {
    int64_t elements = 0;
    for (const auto& [peer, fragments] : messages) elements += elements_of(fragments);
    return elements * element_bytes;
  }
};

// A list of copies. Copies with equal buffers and dtypes are merged into one instruction.
class Copies {
 public:
  // Adds a copy, or its boxes to an earlier copy with equal buffers and dtypes.
  void add(Copy copy) {
    const auto dtype_id = [](const std::optional<DType>& dtype) { return dtype ? static_cast<int>(dtype->id()) : -1; };
    const auto [found, is_new] =
        known_.try_emplace({copy.src, copy.dst, dtype_id(copy.src_dtype), dtype_id(copy.dst_dtype)}, copies_.size());
    if (is_new) {
      copies_.push_back(std::move(copy));
    } else {
      append(copies_[found->second].boxes, std::move(copy.boxes));
    }
  }

  // Returns the copies. Nothing may be added after this call.
  std::vector<Copy> take() { return std::move(copies_); }

 private:
  std::vector<Copy> copies_;
  // By source buffer, destination buffer and ids of both dtypes (-1: the buffer's): index into copies_.
  std::map<std::tuple<int, int, int, int>, size_t> known_;
};

// Writes the program of one rank. `rounds_` has only the rounds in which the rank sends or receives.
class BatchCompiler {
 public:
  BatchCompiler(const BatchPlan& plan, Rank rank, const BatchStrides& strides, bool through_host)
      : plan_(plan), batch_(plan.batch()), rank_(rank), strides_(strides) {
    program_.dtype = DType::kUInt8;  // dtype of the buckets
    program_.stages_on_host = through_host;
    program_.destination_ends.resize(batch_.destinations.size());
  }

  // Returns the program (compile_batch). Must be called once.
  Program compile(int64_t group_size) {
    program_.groups.push_back({{}, {}, to_int(rank_)});
    for (int64_t r = 0; r < group_size; ++r) program_.groups[0].ranks.push_back(Rank{r});
    program_.step_texts.emplace_back("copies of elements that stay on the rank");
    for (int r = 0; r < plan_.num_rounds(); ++r) {
      program_.step_texts.push_back(concat("round ", r, " of ", plan_.num_rounds()));
    }
    add_tensors(batch_.sources, strides_.sources, BufferRole::kInput);
    add_tensors(batch_.destinations, strides_.destinations, BufferRole::kDestination);
    find_rounds();
    add_buckets();
    write_instructions();
    return std::move(program_);
  }

 private:
  // Adds a buffer for the local part of each tensor.
  void add_tensors(const std::vector<Layout>& layouts, const std::vector<std::vector<int64_t>>& strides,
                   BufferRole role) {
    for (size_t i = 0; i < layouts.size(); ++i) {
      std::vector<int64_t> shape = layouts[i].local_shape_of_rank(rank_);
      const int64_t count = extent_of(shape, strides[i]);
      program_.buffers.push_back({count, layouts[i].dtype(), role, std::move(shape), strides[i]});
    }
  }
  // Return the buffers of an item's source and destination.
  BufferId source(int item) const { return BufferId{batch_.items[item].source}; }
  BufferId destination(int item) const {
    return BufferId{static_cast<int>(batch_.sources.size()) + batch_.items[item].destination};
  }
  // Returns the entry of an item's destination in Program::destination_ends.
  DestinationEnd& end_of(int item) { return program_.destination_ends[batch_.items[item].destination]; }

  // Sets parts_ and rounds_. Throws InvariantError if a round is larger than a bucket.
  void find_rounds() {
    for (const BatchPlan::Kind& kind : plan_.kinds()) parts_.push_back(part_of(*kind.exchange, rank_));
    for (const int item : plan_.order()) {
      const RankPart& part = parts_[plan_.kind_of(item)];
      if (part.sends.empty() && part.receives.empty()) continue;
      for (const ItemPiece& piece : plan_.pieces(item)) {
        add_fragments(item, piece, part.sends, &Round::sends);
        add_fragments(item, piece, part.receives, &Round::receives);
      }
    }
    for (const auto& [r, round] : rounds_) {
      check_invariant(round.size_bytes() <= plan_.bucket_bytes(), "round ", r, " packs ", round.size_bytes(),
                      " bytes into buckets of ", plan_.bucket_bytes());
    }
  }

  // Adds one piece of an item to its round: for each of these messages of the item, the fragment that is in the piece.
  // `side` is &Round::sends or &Round::receives.
  void add_fragments(int item, const ItemPiece& piece, const std::vector<Exchange::Message>& messages,
                     Round::Messages Round::* side) {
    for (const Exchange::Message& message : messages) {
      const int64_t elements = message.elements.count();
      const int64_t begin = ItemPiece::before(piece.begin, elements);
      const int64_t end = ItemPiece::before(piece.end, elements);
      if (begin == end) continue;
      Round& round = rounds_[piece.round];
      round.element_bytes = plan_.wire_dtype(item).size_bytes();
      (round.*side)[message.peer].push_back({item, &message.elements, begin, end});
    }
  }

  // Adds the buckets. Each is as large as the largest round that uses it. If messages are staged in host memory, each
  // bucket also gets a buffer of its size there.
  void add_buckets() {
    const size_t count = std::min<size_t>(plan_.buckets(), rounds_.size());
    std::vector<int64_t> sizes(count, 0);
    size_t i = 0;
    for (const auto& [r, round] : rounds_) {
      int64_t& size = sizes[i++ % count];
      size = std::max(size, round.size_bytes());
    }
    const auto add = [&](int64_t size, bool is_on_host) {
      program_.buffers.push_back({size, DType::kUInt8, BufferRole::kTemporary, {}, std::nullopt, is_on_host});
      return BufferId{static_cast<int>(program_.buffers.size()) - 1};
    };
    for (const int64_t size : sizes) buckets_.push_back(add(size, false));
    message_buffers_ = buckets_;
    for (size_t b = 0; program_.stages_on_host && b < count; ++b) message_buffers_[b] = add(sizes[b], true);
  }

  // Writes all instructions, in the order given in the header.
  void write_instructions() {
    const size_t in_flight = buckets_.size();
    std::vector<const std::pair<const int, Round>*> rounds;  // number in the plan, and round
    for (const auto& round : rounds_) rounds.push_back(&round);
    std::vector<Ticket> tickets(rounds.size(), kNoTicket);
    const auto start = [&](size_t i) {
      step_ = 1 + rounds[i]->first;
      tickets[i] = write_start(rounds[i]->second, i % in_flight);
    };
    for (size_t i = 0; i < in_flight; ++i) start(i);
    step_ = 0;
    write_local_copies();
    for (size_t i = 0; i < rounds.size(); ++i) {
      step_ = 1 + rounds[i]->first;
      write_end(rounds[i]->second, i % in_flight, tickets[i]);
      if (i + in_flight < rounds.size()) start(i + in_flight);
    }
    for (DestinationEnd& end : program_.destination_ends) end.sent = std::max(end.sent, end.written);
  }

  // Writes the start of a round: copies from sources to the bucket, and the transfer. Returns the transfer's ticket.
  // `bucket` is an index into buckets_.
  Ticket write_start(const Round& round, size_t bucket) {
    SendReceive move{0, {}, {}};
    Copies copies;
    int64_t position = 0;  // in elements
    for (const auto& [peer, fragments] : round.sends) {
      move.sends.push_back({to_int(peer), range_of(fragments, round, message_buffers_[bucket], position)});
      for (const Fragment& fragment : fragments) {
        const CopySide from = CopySide::strided(part(fragment.item).src_axes, src_strides(fragment.item));
        Copy copy{source(fragment.item), buckets_[bucket], boxes_of(fragment, from, CopySide::packed(position))};
        copy.dst_dtype = plan_.wire_dtype(fragment.item);
        copies.add(std::move(copy));
        position += fragment.end - fragment.begin;
      }
    }
    for (const auto& [peer, fragments] : round.receives) {
      move.receives.push_back({to_int(peer), range_of(fragments, round, message_buffers_[bucket], position)});
      position += elements_of(fragments);
    }
    emit(copies.take());
    copy_between(buckets_[bucket], message_buffers_[bucket], {buckets_[bucket], 0, round.sent_bytes()});
    emit(std::move(move));
    return Ticket{static_cast<int>(program_.instructions.size()) - 1};
  }

  // Writes the copies of elements that stay on the rank.
  void write_local_copies() {
    Copies copies;
    for (int item = 0; item < std::ssize(batch_.items); ++item) {
      const RankPart& rank_part = part(item);
      if (!rank_part.kept) continue;
      copies.add({source(item), destination(item),
                  rank_part.kept->boxes(CopySide::strided(rank_part.src_axes, src_strides(item)),
                                        CopySide::strided(rank_part.dst_axes, dst_strides(item)))});
    }
    emit(copies.take());
  }

  // Writes the end of a round: a Wait, and copies from the bucket to destinations. `bucket` was passed to the round's
  // write_start(), which returned `ticket`.
  void write_end(const Round& round, size_t bucket, Ticket ticket) {
    emit(Wait{ticket});
    for (const auto& [peer, fragments] : round.sends) {
      for (const Fragment& fragment : fragments) end_of(fragment.item).sent = next_index();
    }
    const int64_t sent_bytes = round.sent_bytes();
    copy_between(message_buffers_[bucket], buckets_[bucket],
                 {buckets_[bucket], sent_bytes, round.size_bytes() - sent_bytes});
    Copies copies;
    int64_t position = sent_bytes / round.element_bytes;
    for (const auto& [peer, fragments] : round.receives) {
      for (const Fragment& fragment : fragments) {
        const CopySide to = CopySide::strided(part(fragment.item).dst_axes, dst_strides(fragment.item));
        Copy copy{buckets_[bucket], destination(fragment.item), boxes_of(fragment, CopySide::packed(position), to)};
        copy.src_dtype = plan_.wire_dtype(fragment.item);
        copies.add(std::move(copy));
        position += fragment.end - fragment.begin;
      }
    }
    emit(copies.take());
  }

  // Copies a range of a bucket between the device and host memory. Does nothing if messages are not staged on the host.
  void copy_between(BufferId src, BufferId dst, const BufferRange& range) {
    if (src == dst || range.count == 0) return;
    emit(Copy{src, dst, {{range.offset, range.offset, {range.count}, {1}, {1}}}});
  }

  // Returns the byte range of a message in a bucket. `position` is the element at which it begins.
  static BufferRange range_of(const std::vector<Fragment>& fragments, const Round& round, BufferId bucket,
                              int64_t position) {
    return {bucket, position * round.element_bytes, elements_of(fragments) * round.element_bytes};
  }
  // Returns the boxes that copy the elements of a fragment.
  static std::vector<Box> boxes_of(const Fragment& fragment, const CopySide& from, const CopySide& to) {
    return fragment.message->slice(fragment.begin, fragment.end).boxes(from, to);
  }
  // Returns this rank's part of the exchange of an item.
  const RankPart& part(int item) const { return parts_[plan_.kind_of(item)]; }
  const std::vector<int64_t>& src_strides(int item) const { return strides_.sources[batch_.items[item].source]; }
  const std::vector<int64_t>& dst_strides(int item) const {
    return strides_.destinations[batch_.items[item].destination];
  }

  // Returns the index of the next instruction.
  int next_index() const { return static_cast<int>(program_.instructions.size()); }
  // Appends an instruction that belongs to step_.
  void emit(Operation operation) { program_.instructions.push_back({std::move(operation), step_}); }
  // Emits copies. For each destination that a copy writes, sets DestinationEnd::written to the index after the copy.
  void emit(std::vector<Copy> copies) {
    const auto first_destination = static_cast<int>(batch_.sources.size());
    for (Copy& copy : copies) {
      const int destination = copy.dst - first_destination;
      emit(Operation(std::move(copy)));
      if (destination < static_cast<int>(batch_.destinations.size())) {
        program_.destination_ends[destination].written = next_index();
      }
    }
  }

  const BatchPlan& plan_;
  const Batch& batch_;
  const Rank rank_;
  const BatchStrides& strides_;
  std::vector<RankPart> parts_;  // by index into BatchPlan::kinds()
  std::map<int, Round> rounds_;  // by number of the round in the plan
  std::vector<BufferId> buckets_;
  std::vector<BufferId> message_buffers_;  // by bucket: the bucket itself, or its copy in host memory if staged there
  Program program_;
  int step_ = 0;  // step of the instructions that are emitted next
};

}  // namespace

Program compile_batch(const BatchPlan& plan, Rank rank, int64_t group_size, const BatchStrides& strides,
                      bool through_host) {
  return BatchCompiler(plan, rank, strides, through_host).compile(group_size);
}

}  // namespace shardwright
