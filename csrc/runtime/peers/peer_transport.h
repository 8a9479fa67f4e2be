// The transport that copies between the memory of peers, without kernels of a communication library. A rank copies data
// for other ranks into its own arena, which is in PyTorch's symmetric memory, and the other ranks copy the data from
// the arena. On NVLink, copy engines do such copies, which take no multiprocessors from a product.
//
// `shardwright.prepare(peer_arena_bytes=...)` enables this transport for gathers and messages. Reductions and small
// transfers still use the group's previous transport. None of this has run on a GPU.
//
// An *arena* is a buffer of each rank that all ranks of the group can read. In a group of n ranks it has n rows of
// kSlots = 2 *slots*, and a slot holds one piece of a message. Only rank r reads row r of another rank's arena. The row
// with the owner's own number is for gathers: all other ranks read it. A transfer runs in *rounds*. A message is
// divided into pieces of the size of a slot. Piece j between two ranks is sent in round j, in slot j % kSlots of its
// row.
//
// For example, rank 0 of 3 sends 10 MiB to rank 2, with slots of 4 MiB, through row 2 of its arena:
//
//   round   piece    slot   rank 0 (owner)                                rank 2 (reader)
//   0       4 MiB    0      waits for free(0), fills, sets full(0)        waits for full(0), reads, sets free(0)
//   1       4 MiB    1      waits for free(1), fills, sets full(1)        waits for full(1), reads, sets free(1)
//   2       2 MiB    0      waits for free(0), set after the read of      waits for full(0), reads, sets free(0)
//                           round 0, fills, sets full(0)
//
// Each slot has two signals for each pair of ranks; a signal is either set or not:
//
//   signal      set by                                   awaited and reset by
//   full(slot)  the owner, when it has filled the slot   the reader, before it reads
//   free(slot)  the reader, when it has read the slot    the owner, before it fills the slot again
//
// Between transfers free() of every slot is set and full() is not. So signals need no counters, every transfer begins
// with slot 0, and a captured graph may be replayed any number of times.
//
// There is no deadlock. A rank runs the transfers of one group on one stream, in the order in which they were started,
// which is the same on all ranks. In each transfer a rank fills slots for round 0; then in each round j it first fills
// for round j + 1 and then reads for round j. Filling for round j waits for reads of round j - kSlots, and reading in
// round j waits for fills for round j. Both come earlier on the other ranks' streams.
//
// A gather in two halves, `offer` and `fetch`, is for a product that waits for a flag of each chunk. It uses the whole
// arena as one buffer, so `offer` first waits for free() of both slots of every peer, and `fetch` sets them again at
// its end. `offer` ends by waiting for full(0) of all peers, which they set once their arenas are filled. So until its
// last copy `fetch` waits for no signal. It consists of copies, which copy engines do, and of flags, which the stream
// sets without a kernel. This is necessary because a signal needs a kernel: while the product occupies all
// multiprocessors and waits for a flag that comes after the signal, that kernel could not start.
//
// The flags are in the rank's own memory. Every run sets them to 0 before the fetch, and only this rank's stream sets
// them to 1. So flags need no generation numbers, and no run sees a flag of an earlier run.
//
// If a peer does not signal within the group's timeout, the wait fails. On CUDA the waiting kernel then prints the
// ranks and traps, and the process gets a CUDA error at its next call.
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
  std::chrono::milliseconds timeout{0};  // maximum wait for a signal of a peer
};

// Makes the group use a PeerTransport for later transfers on the device: allocates its arenas and maps them into all
// ranks. All ranks of the group must call it with the same settings; blocks the host. Does nothing for a group of one
// rank, or if the group has such arenas already. Throws UserError if the device has no memory that peers can read, if
// the arena is too small for the number of ranks, if the group has more ranks than PyTorch's signal pads allow, if the
// group was destroyed or has arenas with other settings or on another device, or while a graph is captured.
void use_peer_copies(RankGroup& group, c10::Device device, const PeerSettings& settings);

// Returns the counter of bytes copied from peers since the start of the process or the last reset.
std::atomic<int64_t>& peer_bytes();

// A group's transport by copies between arenas. It delegates reductions, small transfers and transfers on other devices
// to `previous`.
class PeerTransport final : public Transport {
 public:
  using SymmetricMemory = c10d::symmetric_memory::SymmetricMemory;

  // `previous`: the group's previous transport, which must outlive this one. `arena`: this rank's arena, as bytes.
  // `memory`: PyTorch's handle of the arenas of all ranks.
  PeerTransport(Transport* previous, at::Tensor arena, c10::intrusive_ptr<SymmetricMemory> memory,
                PeerSettings settings);

  // Sets free() of all slots and blocks the host until every peer has signaled. All ranks must call it once, before any
  // transfer. It detects unreachable peers, and makes CUDA load the kernels of signals; a later load could block the
  // host.
  void initialize_signals();

  const PeerSettings& settings() const { return settings_; }
  c10::Device device() const { return arena_.device(); }

  void connect(c10::Device device) override { previous_->connect(device); }
  WorkPtr all_gather(at::Tensor& output, at::Tensor& input) override;
  WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) override;
  WorkPtr all_reduce(at::Tensor& data, ReduceOp op) override;
  // Sends each part as a message, unless the tensors are on another device.
  WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                     std::vector<int64_t> input_counts) override;
  std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) override;
  // Supports `offer` and `fetch` on its device for parts that fit into an arena.
  std::optional<std::string> why_no_offers(c10::Device device, int64_t bytes) const override;
  void offer(const at::Tensor& input) override;
  void fetch(at::Tensor& output, const at::Tensor& flags) override;
  std::chrono::milliseconds timeout() const override { return settings_.timeout; }

 private:
  // The pieces of messages, by round. A piece is flat bytes, at most as long as a slot.
  using Rounds = std::vector<std::vector<Message>>;

  // True if this transport transfers a message or part itself; else the previous transport does.
  bool handles(const at::Tensor& tensor) const;
  // Divides messages into pieces and assigns rounds. The pieces of one message are in consecutive rounds.
  Rounds rounds_of(const std::vector<Message>& messages) const;
  // Runs the rounds of an exchange of messages. stream_ must be current.
  void exchange(const Rounds& sends, const Rounds& receives);
  // Runs an all-gather: in each round, fills a slot of this rank's own row, which all other ranks read. stream_ must be
  // current.
  void gather(at::Tensor& output, at::Tensor& input);
  // Copies a piece into this rank's slot for a peer, once the slot is free, and then marks the slot as full.
  void fill(const Message& message, size_t round);
  // Copies a piece from a row of a peer's arena to `message.data`, once the piece's slot is full, and then marks the
  // slot as free.
  void read(const Message& message, size_t round, int64_t row);
  // Returns the first `bytes` bytes of the slot for a round, in a row of the arena of rank `owner`.
  at::Tensor slot(int64_t owner, int64_t row, size_t round, int64_t bytes) const;
  // Makes the current stream wait until a peer sets a signal, and reset it. `channel`: the number of the signal, from
  // full() or free().
  void wait_for(int64_t peer, int channel);
  // Makes the current stream set a signal for a peer.
  void signal(int64_t peer, int channel);

  Transport* const previous_;  // the group's previous transport
  const at::Tensor arena_;
  const c10::intrusive_ptr<SymmetricMemory> memory_;
  const PeerSettings settings_;
  const int64_t rank_;
  const int64_t size_;
  const int64_t slot_bytes_;
  const c10::Stream stream_;        // runs all transfers of this transport
  std::vector<at::Tensor> arenas_;  // the arenas of all ranks, mapped into this process
  std::mutex mutex_;                // held while a transfer is submitted
};

}  // namespace shardwright
