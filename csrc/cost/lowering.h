// How the moves of a plan are carried out: what the transport behind a process group can do, and from which sizes on
// it does something else faster.
//
// Code asks for a capability, never for a name. So another transport is another value here, and the value is part of
// every plan: all ranks write the same instructions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Gloo's all-to-all answers several times faster than its single messages do, so small gathers pay for sending every
// peer a copy of its own. Above this the copies cost more.
constexpr int64_t kMaxCopiedGatherBytes = int64_t{1} << 20;

// It sends before it says that it receives, which then has to wait behind what is sent: where a message does not fit
// into the buffers of its socket, a link carries data in one direction at a time. From this size on, exchanges are
// messages whose receivers are told of first.
constexpr int64_t kMinMessageBytes = int64_t{1} << 18;

struct Lowering {
  std::string_view name;              // what people write and files say
  std::string_view default_topology;  // what plans are chosen by where nothing else is known

  // Has reduce-scatter and all-reduce of its own that are worth using; else reductions are exchanged and summed here,
  // in the order of positions.
  bool reduces = true;
  // Has an all-gather of its own for parts of one size.
  bool gathers = true;
  // Transfers read and write the memory of devices, on their streams. Else the host carries them out, in host memory.
  bool is_on_device = true;
  // A rank may wait for those alone that it has something to do with, in process groups made for them.
  bool narrows_groups = false;
  // Parts of so many bytes are gathered by an all-to-all of copies, and larger ones by messages; between two ranks,
  // who make no copies then, all of them. 0: always by messages.
  int64_t copied_gather_bytes = 0;
  // Exchanges of so many bytes to each peer and more go as messages; fewer, and all where it is 0, as an all-to-all.
  int64_t message_bytes = 0;

  // Whether a gather over so many ranks of parts of at most so many bytes is an all-to-all of copies.
  constexpr bool copies_gather(int64_t group_size, int64_t part_bytes) const {
    return copied_gather_bytes > 0 && (group_size == 2 || part_bytes <= copied_gather_bytes);
  }
  constexpr bool goes_by_messages(int64_t bytes_to_each_peer) const {
    return message_bytes > 0 && bytes_to_each_peer >= message_bytes;
  }

  constexpr bool operator==(const Lowering&) const = default;

  // Collectives of the transport where they fit: NCCL's, and what behaves like it.
  static const Lowering kNccl;
  // Gloo's own gathers and reductions stage through extra copies, so they are composed.
  static const Lowering kGloo;

  // "nccl" or "gloo"; throws UserError naming these.
  static const Lowering& named(std::string_view name);
  // In an order that stays: plans in files say the place.
  static const std::vector<Lowering>& all();
};

inline constexpr Lowering Lowering::kNccl{.name = "nccl", .default_topology = "64x8"};
inline constexpr Lowering Lowering::kGloo{.name = "gloo",
                                          .default_topology = "gloo-local",
                                          .reduces = false,
                                          .gathers = false,
                                          .is_on_device = false,
                                          .narrows_groups = true,
                                          .copied_gather_bytes = kMaxCopiedGatherBytes,
                                          .message_bytes = kMinMessageBytes};

}  // namespace shardwright
