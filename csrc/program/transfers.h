// The messages between the ranks of a group, and their lowering to instructions.
//
// A TransferSet lists which elements of which tensors this rank sends to each peer and receives from each peer.
// `exchange` lowers the steps of plans, with or without rounds. Products lower one set for each chunk, and emit other
// work between these parts of the lowering:
//
//   1. Messages::choose_memory  chooses the memory of each message during the transfer: its tensor, if it is one run
//                               there and may stay, or staging memory;
//   2. Messages::copy           packs messages that are sent from staging memory;
//   3. start                    emits one instruction that starts the transfer;
//   4. after a Wait, Messages::copy unpacks messages that were received into staging memory.
//
// Composed reductions choose the memory of their messages themselves (Messages::add_placed), and only start them.
// transfer_method.h chooses the collective or messages of a set. `start` emits all gathers, all-to-alls and messages of
// all programs.
//
// Example: this rank holds a 4 x 6 tensor in b0, and sends its rows [0, 2) to one peer and its columns [1, 3) to
// another. The rows are the run b0[0:12] and stay there. The columns are not a run, and are packed into a new buffer
// b2[0:8].
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "layout/selection.h"
#include "program/builder.h"
#include "program/program.h"
#include "program/transfer_method.h"

namespace shardwright {

// Elements of one tensor that are sent or received. `tensor` is the buffer with this rank's part of the tensor.
struct TransferItem {
  BufferId tensor = kMissingBuffer;  // if missing, the caller packs and unpacks the elements itself
  Selection elements;
};

// The memory of messages during the transfer.
struct Staging {
  enum class Memory : uint8_t {
    kShared,  // one new buffer for all staged messages
    kApart,   // a new buffer for each staged message
    kGiven,   // the range `given`
  };
  Memory memory = Memory::kShared;
  BufferRange given = {};
  bool may_stay = true;     // a message that is one run in its tensor is sent from the tensor or received into it
  bool is_one_run = false;  // all messages together are one run, as collectives require; so all stay or none does
  int64_t alignment = 1;    // in elements; staged messages that share memory begin at multiples of it
};

// The messages of one side of a transfer: all messages that this rank sends, or all that it receives.
//
// Invariant: once placed, each message is either in its tensor or entirely in staging memory. With is_one_run, each
// message begins where the one before it ends.
class Messages {
 public:
  enum class Side : uint8_t { kSent, kReceived };

  // `tensor` matters only if no message has elements: it is then the buffer of the empty run(). If it is missing,
  // choose_memory creates a buffer without elements for the run.
  explicit Messages(Side side, BufferId tensor = kMissingBuffer) : side_(side), tensor_(tensor) {}

  // Appends the message to or from a peer: items of one or more tensors, in the order of the message. For collectives,
  // messages must be appended by ascending peer.
  void add(int64_t peer, std::vector<TransferItem> items) { messages_.push_back(make_message(peer, std::move(items))); }
  // Inserts a message before the messages of greater peers.
  void insert(int64_t peer, std::vector<TransferItem> items);
  // Appends a message whose memory is already `range`. Either all messages of one side are added this way or none; if
  // all, the caller need not call `choose_memory` and `copy`.
  void add_placed(int64_t peer, BufferRange range);
  // Removes the message of a peer, if there is one.
  void remove(int64_t peer);

  size_t size() const { return messages_.size(); }
  int64_t peer(size_t i) const { return messages_[i].peer; }
  int64_t count(size_t i) const { return messages_[i].count; }
  // Returns the number of elements of all messages.
  int64_t total_count() const;
  // Returns true if all messages have the same number of elements.
  bool are_equally_long() const;

  // Returns the number of elements of staging memory that choose_memory(builder, staging) uses, with the padding for
  // alignment.
  int64_t staged_count(const Staging& staging) const;

  // Chooses the memory of the messages, and creates the staging buffers.
  void choose_memory(ProgramBuilder& builder, const Staging& staging);

  // Valid once placed, by choose_memory or add_placed:
  const BufferRange& range(size_t i) const { return messages_[i].range; }
  bool is_staged(size_t i) const { return messages_[i].is_staged; }
  bool is_any_staged() const;
  BufferRange run() const;  // the range of all messages; throws InvariantError if they are not one run
  // Returns the placed messages as operands of a SendReceive. Leaves out empty messages.
  std::vector<SendReceive::Message> as_sent_or_received() const;
  std::vector<int64_t> counts(int64_t group_size) const;  // elements to or from each member of the group

  // Packs the staged messages of the sent side, or unpacks the staged messages of the received side: emits copies of
  // their items between tensors and staging memory, one instruction for each pair of buffers. Skips the message of the
  // peer `except` (-1: none).
  void copy(ProgramBuilder& builder, int64_t except = -1) const;

 private:
  struct Message {
    int64_t peer = -1;  // index in the group
    std::vector<TransferItem> items;
    int64_t count = 0;
    std::optional<BufferRange> run = std::nullopt;  // its range in the tensor, if its items are one run in one tensor
    BufferRange range = {};                         // its memory, once chosen: `run` or staging memory
    bool is_staged = false;
  };

  // Makes a message of these items, and sets its length and its run.
  Message make_message(int64_t peer, std::vector<TransferItem> items) const;
  // Return the range of these items, or of all messages, in their tensor; nullopt if they are not one run in one
  // tensor.
  std::optional<BufferRange> run_of(const std::vector<TransferItem>& items) const;
  std::optional<BufferRange> run_of_all() const;

  Side side_;
  BufferId tensor_;
  std::vector<Message> messages_;
  BufferRange empty_run_;  // result of run() if no message has elements; set by choose_memory() and add_placed()
};

// All messages of one rank in one transfer.
struct TransferSet {
  int group = -1;  // index into Program::groups
  Messages sends{Messages::Side::kSent};
  Messages receives{Messages::Side::kReceived};
};

// Elements that stay on this rank and are copied from one buffer to another.
struct OwnItem {
  BufferId from = kMissingBuffer;
  BufferId to = kMissingBuffer;
  Selection elements;
};

// Emits the instruction that starts the transfer of a placed set, and returns its ticket. With kMessages and only empty
// messages, emits nothing and returns kNoTicket. A collective is always emitted, because all ranks must take part.
Ticket start(ProgramBuilder& builder, const TransferSet& set, TransferMethod transfer_method);

// Emits a transfer from tensors to tensors: packs messages, starts the transfer, copies the elements that stay on this
// rank (`own`) meanwhile, waits and unpacks. If `may_send_own` is true and it saves packing, an all-to-all sends the
// own part as a message to this rank instead. An all-gather always does: `own` has one item, whose full buffer `from`
// is sent in place of set.sends.
void exchange(ProgramBuilder& builder, TransferSet set, TransferMethod transfer_method, const std::vector<OwnItem>& own,
              bool may_send_own);

// Starts a reduce-scatter among the members of a group. `contributions` has one part for each member, this rank
// included, all in one run. The caller must call the returned function once: it emits the Wait, and the reduction of
// all members' parts for this rank, which it writes to `result`; `result` is as long as one part. Uses the transport's
// reduce-scatter if it has one and the parts for all members are `equally_long`, otherwise an all-to-all and a local
// reduction.
std::function<void()> start_sum(ProgramBuilder& builder, const Step& step, int group, const Messages& contributions,
                                bool equally_long, BufferRange result);

}  // namespace shardwright
