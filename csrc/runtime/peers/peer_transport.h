// Transfers as copies between the memory of peers, without kernels of a communication library: what a rank has for
// others it copies into an arena of its own, which they all see (PyTorch's symmetric memory), and they copy it from
// there. On NVLink such copies are those of copy engines, which take no multiprocessors from a product.
//
// Nothing of this has run on a GPU. It is used where `shardwright.prepare(peer_arena_bytes=...)` asked for it, for
// gathers and messages; reductions and what is small stay with the transport that the group had before.
//
// Arena of each rank, with n ranks and kSlots slots: the slots for what rank r alone is to read are n rows of slots,
// row r for rank r, and the row of the own rank is for what all others are to read. A message is cut into pieces of a
// slot; piece j between two ranks goes through slot j % kSlots of its row.
//
// Signals between each pair of ranks, two for each slot, each of them set or not:
//
//   signal      set by                                   awaited and reset by
//   full(slot)  the owner, when it has filled the slot   the reader, before it reads
//   free(slot)  the reader, when it has read the slot    the owner, before it fills the slot again
//
// Between transfers all slots are free and none is full. So signals count nothing, every transfer begins with slot 0,
// and a captured graph may be replayed any number of times.
//
// Why nothing waits forever. A rank's transfers of one group are on one stream, in the order in which they were
// started, which is the same on all ranks. Within one, it fills for round 0, then in each round j it first fills for
// round j + 1 and then reads for round j. To fill for round j needs what others read in round j - kSlots, and to read
// in round j needs what others filled for it: both come before it on their streams.
//
// A peer that does not come within the group's timeout ends the wait: on CUDA the waiting kernel prints the ranks and
// traps, so that the process ends with a CUDA error at its next call.
#pragma once

#include <c10/core/Stream.h>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

#include <chrono>
#include <cstdint>
#include <mutex>
#include <vector>

#include "runtime/transport.h"

namespace shardwright {

struct PeerSettings {
  int64_t arena_bytes = 0;  // of each rank
  int64_t min_bytes = 0;    // messages and parts of fewer bytes are left to the other transport
  std::chrono::milliseconds timeout{0};

  bool operator==(const PeerSettings&) const = default;
};

// Gives the group an arena on the device, which its later transfers there go through. Collective among its ranks, who
// must give the same settings; blocks the host. Does nothing for a group of one rank, and the second time. Throws
// UserError where the device has no memory that peers can see, where the arena is too small for the number of ranks,
// where the group has other settings already, and while a graph is captured.
void use_peer_copies(RankGroup& group, c10::Device device, const PeerSettings& settings);

// Bytes that were copied from peers since the start of the process or the last reset.
std::atomic<int64_t>& peer_bytes();

class PeerTransport final : public Transport {
 public:
  using SymmetricMemory = c10d::symmetric_memory::SymmetricMemory;

  // `other` outlives this.
  PeerTransport(Transport* other, at::Tensor arena, c10::intrusive_ptr<SymmetricMemory> memory, PeerSettings settings);

  // To be called once before any transfer, by all ranks: frees all slots, and blocks the host until every peer has been
  // heard of. So who cannot be reached shows here, and CUDA has loaded the kernels that wait before anything depends on
  // what the host does after them.
  void begin();

  const PeerSettings& settings() const { return settings_; }
  c10::Device device() const { return arena_.device(); }

  void connect(c10::Device device) override { other_->connect(device); }
  WorkPtr all_gather(at::Tensor& output, at::Tensor& input) override;
  WorkPtr reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) override;
  WorkPtr all_reduce(at::Tensor& data, ReduceOp op) override;
  // As messages.
  WorkPtr all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                     std::vector<int64_t> input_counts) override;
  std::vector<WorkPtr> send_receive(std::vector<Message>& sends, std::vector<Message>& receives) override;

 private:
  // By round: what goes through one slot, as bytes.
  using Rounds = std::vector<std::vector<Message>>;

  bool takes(const at::Tensor& tensor) const;
  Rounds rounds_of(const std::vector<Message>& messages) const;
  void exchange(const Rounds& sends, const Rounds& receives);
  void gather(at::Tensor& output, at::Tensor& input);
  void fill(const Message& message, size_t round);
  void read(const Message& message, size_t round, int64_t row);
  at::Tensor slot(int64_t owner, int64_t row, size_t round, int64_t bytes) const;
  void wait_for(int64_t peer, int channel);
  void signal(int64_t peer, int channel);

  Transport* const other_;
  const at::Tensor arena_;
  const c10::intrusive_ptr<SymmetricMemory> memory_;
  const PeerSettings settings_;
  const int64_t rank_;
  const int64_t size_;
  const int64_t slot_bytes_;
  const c10::Stream stream_;        // of all transfers of this group
  std::vector<at::Tensor> arenas_;  // of all ranks, as this one sees them
  std::mutex mutex_;                // one transfer is given to the stream at a time
};

}  // namespace shardwright
