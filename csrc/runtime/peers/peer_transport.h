// Transfers as copies between the memory of peers, without kernels of a communication library. A rank copies data for
// other ranks into its own arena, which is in PyTorch's symmetric memory, and they copy the data from there. On NVLink,
// copy engines do such copies, which take no multiprocessors from a product.
//
// An *arena* is a buffer of each rank that all ranks of the group can read. A *slot* is a range of an arena that holds
// one piece of a message. A transfer runs in *rounds*, each with at most one piece per pair of
// sender and receiver.
//
// None of this has run on a GPU. `shardwright.prepare(peer_arena_bytes=...)` turns it on for gathers and messages. The
// group's previous transport keeps reductions and small transfers.
//
// With n ranks, the arena of each rank has n rows of kSlots slots. Only rank r reads row r; all other ranks read the
// row of the arena's own rank. A message is cut into pieces of the size of a slot; piece j between two ranks uses slot
// j % kSlots of its row.
//
// Each slot has two signals for each pair of ranks; a signal is either set or not:
//
//   signal      set by                                   awaited and reset by
//   full(slot)  the owner, when it has filled the slot   the reader, before it reads
//   free(slot)  the reader, when it has read the slot    the owner, before it fills the slot again
//
// Between transfers all slots are free and none is full. So signals need no counters, every transfer begins with slot
// 0, and a captured graph may be replayed any number of times.
//
// There is no deadlock. A rank runs the transfers of one group on one stream, in the order in which they were started,
// which is the same on all ranks. In each transfer a rank fills slots for round 0; then in each round j it first fills
// for round j + 1 and then reads for round j. Filling for round j waits for reads of round j - kSlots, and reading in
// round j waits for fills for round j. Both come earlier on the other ranks' streams.
//
// A gather in two halves (offer, fetch), whose chunks a product waits for, uses the whole arena at once. Both slots of
// each pair are taken when the first half begins, and free again after the second. The first half ends when full(0) has
// told this rank that all others have filled their arenas. So until its last copy the second half waits for no signal:
// it consists of copies, which copy engines do, and flags, which the stream sets itself. A signal would be a kernel.
// While the product holds all multiprocessors and waits for a flag behind that signal, the kernel could not start.
//
// The flags are in the rank's own memory. Every run zeroes them before the fetch, and only this rank's stream sets
// them. So flags need no generation numbers, and no run sees a flag of an earlier run.
//
// If a peer does not signal within the group's timeout, the wait ends. On CUDA the waiting kernel then prints the ranks
// and traps, so that the process ends with a CUDA error at its next call.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

// The settings of a group's arenas; equal on all of its ranks.
struct PeerSettings {
  int64_t arena_bytes = 0;               // per rank
  int64_t min_bytes = 0;                 // smaller messages and parts use the group's previous transport
  std::chrono::milliseconds timeout{0};  // for signals of a peer

  bool operator==(const PeerSettings&) const = default;
};

// Gives the group an arena on the device, for later transfers on it. Collective among its ranks, which must pass
// the same settings; blocks the host. Does nothing for a group of one rank, or if the group has such an arena. Throws
// UserError if the device has no memory that peers can read, if the arena is too small for the number of ranks, if the
// group has an arena with other settings, or while a graph is captured.
void use_peer_copies(RankGroup& group, c10::Device device, const PeerSettings& settings);

// Returns the number of bytes copied from peers since the start of the process or the last reset.
std::atomic<int64_t>& peer_bytes();

// A group's transport by copies between arenas. It passes reductions, small transfers and other devices on to `other`.
class PeerTransport final : public Transport {
 public:
  using SymmetricMemory = c10d::symmetric_memory::SymmetricMemory;

  // `other`: the group's previous transport, which must outlive this one. `arena`: this rank's arena, as bytes.
  // `memory`: PyTorch's handle of the arenas of all ranks.
  PeerTransport(Transport* other, at::Tensor arena, c10::intrusive_ptr<SymmetricMemory> memory, PeerSettings settings);

  // All ranks must call this once, before any transfer. Frees all slots, and blocks the host until every peer has
  // signaled. So unreachable peers are found here. CUDA also loads the waiting kernels here; a later load could block
  // the host.
  void begin();

  const PeerSettings& settings() const { return settings_; }
  c10::Device device() const { return arena_.device(); }

  void connect(c10::Device device) override { other_->connect(device); }
  WorkPtr all_gather(at::Tensor& output, at::Tensor& input) override;
  WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) override;
  WorkPtr all_reduce(at::Tensor& data, ReduceOp op) override;
  // Sends each part as a message.
  WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                     std::vector<int64_t> input_counts) override;
  std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) override;
  // Parts may be as long as the arena.
  std::optional<std::string> why_no_offers(c10::Device device, int64_t bytes) const override;
  void offer(const at::Tensor& input) override;
  void fetch(at::Tensor& output, const at::Tensor& flags) override;
  std::chrono::milliseconds timeout() const override { return settings_.timeout; }

 private:
  // The pieces of messages by round, as bytes, each at most one slot long.
  using Rounds = std::vector<std::vector<Message>>;

  // True if this transport carries out the transfer of a tensor; if not, the previous transport does.
  bool takes(const at::Tensor& tensor) const;
  // Cuts messages into pieces. The pieces of one message are in consecutive rounds.
  Rounds rounds_of(const std::vector<Message>& messages) const;
  // Runs the rounds of messages, with the stream of this group as the current stream.
  void exchange(const Rounds& sends, const Rounds& receives);
  // Runs an all-gather: each round fills a slot of the rank's own row, which all other ranks read.
  void gather(at::Tensor& output, at::Tensor& input);
  // Copies a piece into this rank's slot for a peer, once the slot is free.
  void fill(const Message& message, size_t round);
  // Copies a piece from a row of a peer's arena, once its slot is full. `message.data` is the destination.
  void read(const Message& message, size_t round, int64_t row);
  // Returns the first `bytes` bytes of the slot for a round, in a row of the arena of rank `owner`.
  at::Tensor slot(int64_t owner, int64_t row, size_t round, int64_t bytes) const;
  // Make the current stream wait for a signal from a peer and reset it, or send a signal to a peer. `channel`: the
  // number of the signal, from full() or free().
  void wait_for(int64_t peer, int channel);
  void signal(int64_t peer, int channel);

  Transport* const other_;  // the group's previous transport
  const at::Tensor arena_;
  const c10::intrusive_ptr<SymmetricMemory> memory_;
  const PeerSettings settings_;
  const int64_t rank_;
  const int64_t size_;
  const int64_t slot_bytes_;        // size of a slot
  const c10::Stream stream_;        // runs all transfers of this group
  std::vector<at::Tensor> arenas_;  // the arenas of all ranks, mapped into this process
  std::mutex mutex_;                // held while a transfer is submitted
};

}  // namespace shardwright
