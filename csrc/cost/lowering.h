// A Lowering determines how the moves of a plan are carried out. It lists the capabilities of the transport behind a
// process group, and the sizes in bytes above which another kind of transfer is faster.
//
// Code tests capabilities, never names, so another transport is just another value here. The lowering is part of every
// plan, so all ranks compile the same instructions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace shardwright {

// Largest part in bytes that Gloo gathers by an all-to-all, which sends every peer its own copy of the part. Gloo's
// all-to-all has a several times lower latency than its single messages. For larger parts, making the copies takes
// longer than the lower latency saves.
constexpr int64_t kMaxCopiedGatherBytes = int64_t{1} << 20;

// Exchanges over Gloo with at least this many bytes per peer are sent as messages whose receives are posted first, not
// as an all-to-all. In Gloo's all-to-all, a rank writes its announcement that it can receive to the socket after its
// own data. So if a message does not fit into the socket's buffers, the link carries data in one direction at a time.
constexpr int64_t kMinMessageBytes = int64_t{1} << 18;

struct Lowering {
  std::string_view name;              // the name in APIs and files
  std::string_view default_topology;  // the topology of plans if none is given

  // True: the transport's own reduce-scatter and all-reduce are used. False: contributions are exchanged, and the
  // library sums them in the order of positions.
  bool reduces = true;
  // The transport's own all-gather is used if all parts have the same size.
  bool gathers = true;
  // True: transfers use device memory and the device's streams. False: the host carries them out, in host memory.
  bool is_on_device = true;
  // True: an exchange in which not all pairs of ranks send each other data runs in one process group per connected
  // component (exchange/mesh_exchange.h), so that a rank waits only for the ranks of its own component.
  bool narrows_groups = false;
  // Parts of up to this many bytes are gathered by an all-to-all of copies, larger parts by messages. Two ranks always
  // use an all-to-all, because each makes only one copy. 0: always messages.
  int64_t copied_gather_bytes = 0;
  // Exchanges of at least this many bytes per peer are sent as messages, smaller exchanges as an all-to-all. 0: always
  // an all-to-all.
  int64_t message_bytes = 0;

  // Returns true if a gather of parts of at most `part_bytes` over `group_size` ranks is an all-to-all of copies.
  constexpr bool copies_gather(int64_t group_size, int64_t part_bytes) const {
    return copied_gather_bytes > 0 && (group_size == 2 || part_bytes <= copied_gather_bytes);
  }
  // Returns true if an exchange is sent as messages instead of an all-to-all.
  constexpr bool uses_messages(int64_t bytes_to_each_peer) const {
    return message_bytes > 0 && bytes_to_each_peer >= message_bytes;
  }

  constexpr bool operator==(const Lowering&) const = default;

  // NCCL and transports that behave like it: their own collectives are used wherever they apply.
  static const Lowering kNccl;
  // Gloo's own gathers and reductions make extra copies, so they are composed of other transfers.
  static const Lowering kGloo;

  // Returns the lowering "nccl" or "gloo". Throws UserError on other names.
  static const Lowering& named(std::string_view name);
  // All lowerings in a fixed order: serialized plans refer to them by index.
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
