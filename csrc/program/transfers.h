// What the ranks of a group send each other, in one form, and its lowering to instructions.
//
// A TransferSet says which elements of which tensors this rank sends to whom, and which it receives from whom. Steps of
// plans are lowered by `exchange`, whole or in rounds. Products lower one set for each chunk, and put work of their own
// between the parts of the lowering:
//
//   1. Messages::place  decides where each message lies while it travels: in its tensor, where it is one run there and
//                       may stay, or in staging memory;
//   2. Messages::copy   packs what is sent from staging memory;
//   3. start            one instruction starts the transfer;
//   4. a Wait, and Messages::copy unpacks what was received into staging memory.
//
// Example: this rank holds a 4 x 6 tensor in b0, and sends its rows [0, 2) to one peer and its columns [1, 3) to
// another one. The rows are the run b0[0:12] and stay there. The columns are no run, and are packed into a new buffer
// b2[0:8].
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "program/boxes.h"
#include "program/builder.h"
#include "program/program.h"

namespace shardwright {

// Elements of one tensor that are sent or received, with the buffer that holds this rank's part of the tensor. What is
// sent lies at the parcel's side a, what is received at its side b.
struct TransferItem {
  BufferId tensor = kMissingBuffer;  // none: whoever lowers the set writes or reads the staged elements
  Parcel parcel;
};

// Where messages lie while they travel.
struct Staging {
  enum class Memory : uint8_t {
    kShared,  // one new buffer for all that are staged
    kApart,   // a new buffer for each
    kGiven,   // `given`
  };
  Memory memory = Memory::kShared;
  BufferRange given = {};
  bool may_stay = true;     // a message that is one run in its tensor is sent from there, or received there
  bool is_one_run = false;  // all lie one after the other, as collectives take them: all of them stay or none does
  int64_t alignment = 1;    // elements: where staged messages that share memory may begin
};

// The messages of one side of a transfer: all that this rank sends, or all that it receives.
//
// Invariant: once placed, a message is either in its tensor or entirely in staging memory, and in one run each begins
// where the one before it ends.
class Messages {
 public:
  enum class Side : uint8_t { kSent, kReceived };

  // `tensor`: where no messages at all are said to lie as one run; else they get a buffer without elements.
  explicit Messages(Side side, BufferId tensor = kMissingBuffer) : side_(side), tensor_(tensor) {}

  // All that goes to a peer, or comes from it: items of several tensors perhaps, in the order in which they travel.
  // Collectives want messages by ascending peer.
  void add(int64_t peer, std::vector<TransferItem> items) { messages_.push_back(message(peer, std::move(items))); }
  void insert(int64_t peer, std::vector<TransferItem> items);  // before the peers that are greater
  void remove(int64_t peer);

  size_t size() const { return messages_.size(); }
  int64_t peer(size_t i) const { return messages_[i].peer; }
  int64_t count(size_t i) const { return messages_[i].count; }
  int64_t total_count() const;
  bool are_equally_long() const;

  // Elements that are staged with this staging, those lost to alignment included.
  int64_t staged_count(const Staging& staging) const;

  // Decides where they lie, and makes the staging buffers that this takes.
  void place(ProgramBuilder& builder, const Staging& staging);

  // Once placed:
  const BufferRange& range(size_t i) const { return messages_[i].range; }
  bool is_staged(size_t i) const { return messages_[i].is_staged; }
  bool is_any_staged() const;
  BufferRange run() const;  // all of them, where they are one run
  std::vector<SendReceive::Message> as_sent_or_received() const;
  std::vector<int64_t> counts(int64_t group_size) const;  // by index in the group

  // Packs or unpacks: copies the items of staged messages between their tensors and staging memory, in one instruction
  // for each pair of these. Leaves the message of `except` alone.
  void copy(ProgramBuilder& builder, int64_t except = -1) const;

 private:
  struct Message {
    int64_t peer = -1;  // index in the group
    std::vector<TransferItem> items;
    int64_t count = 0;
    std::optional<BufferRange> run = std::nullopt;  // in the one tensor of its items
    BufferRange range = {};
    bool is_staged = false;
  };

  Message message(int64_t peer, std::vector<TransferItem> items) const;
  std::optional<BufferRange> run_of(const std::vector<TransferItem>& items) const;
  std::optional<BufferRange> run_of_all() const;

  Side side_;
  BufferId tensor_;
  std::vector<Message> messages_;
  BufferRange empty_run_;
};

struct TransferSet {
  int group = -1;  // index into Program::groups
  Messages sends{Messages::Side::kSent};
  Messages receives{Messages::Side::kReceived};
};

// What stays on this rank, from one buffer to another.
struct OwnItem {
  BufferId from = kMissingBuffer;
  BufferId to = kMissingBuffer;
  Parcel parcel;
};

// The instruction that carries a set.
enum class Carrier : uint8_t {
  kAllGather,  // the transport's own: every rank sends all of what it has, which is as much on all
  kAllToAll,   // by all ranks of the group
  kMessages,   // by those that have something for each other
};

// Starts the transfer of a set that is placed. kNoTicket where messages carry it and there are none.
Ticket start(ProgramBuilder& builder, const TransferSet& set, Carrier carrier);

// Lowers a whole set from tensors to tensors: starts it, copies what stays on this rank (`own`) meanwhile, waits and
// unpacks. In an all-to-all the own part travels too where it may and that saves packing the others. In an all-gather
// it always does: there is one own item, all of whose `from` is sent, and the set's sends are not looked at.
void exchange(ProgramBuilder& builder, TransferSet set, Carrier carrier, const std::vector<OwnItem>& own,
              bool own_may_travel);

// Starts summing what the members of a group give each other. `given` holds a part for each member in one run, this
// rank among them. The answer, to be called once: waits, and leaves in `result` the sum of the parts that are for this
// rank; it is as long as those. By the transport's own reduce-scatter where it has one and all parts of all members are
// `equally_long`, else as an all-to-all that is summed here.
std::function<void()> start_sum(ProgramBuilder& builder, const Step& step, int group, const Messages& given,
                                bool equally_long, BufferRange result);

}  // namespace shardwright
