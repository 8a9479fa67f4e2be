#include "runtime/peers/peer_transport.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "runtime/flag_product.h"
#include "runtime/flat.h"
#include "runtime/side_stream.h"
#include "support/error.h"

namespace shardwright {
namespace {

namespace symmetric_memory = c10d::symmetric_memory;

constexpr int kSlots = 2;                // per row of an arena: one slot is read while the other one is filled
constexpr int kChannels = 2 * kSlots;    // signals for each pair of ranks
constexpr int64_t kSlotAlignment = 256;  // bytes

// Return the channels (numbers of signals between two ranks) of full(slot) and free(slot), for the slot of a round.
int full(size_t round) { return static_cast<int>(round % kSlots); }
int free(size_t round) { return kSlots + static_cast<int>(round % kSlots); }

// Returns the size in bytes of a slot: an arena has `ranks` rows of kSlots slots.
int64_t slot_bytes_of(int64_t arena_bytes, int64_t ranks) {
  return arena_bytes / (ranks * kSlots) / kSlotAlignment * kSlotAlignment;
}

// Returns a contiguous tensor as flat bytes.
at::Tensor bytes_of(const at::Tensor& tensor) { return flat_bytes(tensor, 0, tensor.numel()); }

// Makes a stream current from construction to destruction. At first the stream waits for the work of the stream that
// was current before; at the end, also after an exception, that stream waits for the work of this one.
class StreamFork {
 public:
  explicit StreamFork(c10::Stream stream) : stream_(stream) {
    StreamEvent(current_stream(stream.device())).block(stream);
    guard_.emplace(stream);
  }
  ~StreamFork() {
    try {
      const StreamEvent end(current_stream(stream_.device()));
      guard_.reset();
      wait_for(end, stream_.device());
    } catch (const std::exception&) {
      // The device has failed; its next call reports that.
    }
  }
  StreamFork(const StreamFork&) = delete;
  StreamFork& operator=(const StreamFork&) = delete;

 private:
  c10::Stream stream_;
  std::optional<c10::StreamGuard> guard_;
};

// Throws UserError if the arena is too small for the group, or the group too large for PyTorch's signal pads.
void check_arena(const RankGroup& group, const PeerSettings& settings) {
  const int64_t min_bytes = group.size() * kSlots * kSlotAlignment;
  check_user(settings.arena_bytes >= min_bytes, "peer_arena_bytes must be at least ", min_bytes, " for a group of ",
             group.size(), " ranks, got ", settings.arena_bytes);
  const auto max_ranks = static_cast<int64_t>(symmetric_memory::get_signal_pad_size() / sizeof(uint32_t) / kChannels);
  check_user(group.size() <= max_ranks, "peer_arena_bytes: groups must have at most ", max_ranks, " ranks, got ",
             group.size(), ". torch.distributed._symmetric_memory.set_signal_pad_size raises this limit");
}

// Throws UserError if the device has no memory that peers can read, or if a graph is captured.
void check_device(c10::Device device) {
  check_user(!device.is_cpu() && symmetric_memory::has_allocator(device.type()),
             "peer_arena_bytes: tensors must be on a CUDA device with symmetric memory, got ", device.str());
  const std::string backend = symmetric_memory::get_backend(device).value_or("none");
  check_user(!device.is_cuda() || backend == "CUDA",
             "peer_arena_bytes: the backend of symmetric memory must be 'CUDA', got '", backend,
             "'. Set it with torch.distributed._symmetric_memory.set_backend");
  check_user(!is_capturing(device), "peer_arena_bytes: an arena cannot be made while a graph is captured. Call ",
             "shardwright.prepare before the capture");
}

}  // namespace

std::atomic<int64_t>& peer_bytes() {
  static std::atomic<int64_t> bytes{0};
  return bytes;
}

void use_peer_copies(RankGroup& group, c10::Device device, const PeerSettings& settings) {
  if (group.size() == 1) return;
  check_device(device);
  check_arena(group, settings);
  const GroupLease lease = group.lease();
  check_user(static_cast<bool>(lease), "mesh must have existing process groups, got one that was destroyed");
  if (const auto* existing = dynamic_cast<const PeerTransport*>(lease.operator->())) {
    const auto check_equal = [&](const char* argument, const auto& value, const auto& earlier) {
      check_user(value == earlier, argument, " must be ", earlier, " as in the earlier call for this group of ",
                 group.size(), " ranks, got ", value);
    };
    check_equal("device", device.str(), existing->device().str());
    check_equal("peer_arena_bytes", settings.arena_bytes, existing->settings().arena_bytes);
    check_equal("peer_min_bytes", settings.min_bytes, existing->settings().min_bytes);
    check_equal("timeout of the group in ms", settings.timeout.count(), existing->settings().timeout.count());
    return;
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  at::Tensor arena =
      symmetric_memory::empty_strided_p2p({settings.arena_bytes}, {1}, at::kByte, device, group.name(), std::nullopt);
  const auto memory = symmetric_memory::rendezvous(arena, group.name());
  auto transport = std::make_unique<PeerTransport>(lease.operator->(), std::move(arena), memory, settings);
  transport->initialize_signals();
  group.replace_transport(std::move(transport));
}

PeerTransport::PeerTransport(Transport* previous, at::Tensor arena, c10::intrusive_ptr<SymmetricMemory> memory,
                             PeerSettings settings)
    : previous_(previous),
      arena_(std::move(arena)),
      memory_(std::move(memory)),
      settings_(settings),
      rank_(memory_->get_rank()),
      size_(memory_->get_world_size()),
      slot_bytes_(slot_bytes_of(settings.arena_bytes, size_)),
      stream_(c10::impl::VirtualGuardImpl(arena_.device().type())
                  .getStreamFromGlobalPool(arena_.device(), /*isHighPriority=*/true)) {
  for (int64_t r = 0; r < size_; ++r) {
    arenas_.push_back(memory_->get_buffer(static_cast<int>(r), {settings.arena_bytes}, at::kByte, 0));
  }
}

void PeerTransport::initialize_signals() {
  {
    const StreamFork fork(stream_);
    for (int64_t d = 1; d < size_; ++d) {
      const int64_t peer = (rank_ + d) % size_;
      for (size_t round = 0; round < kSlots; ++round) signal(peer, free(round));
      signal(peer, full(0));
    }
    for (int64_t d = 1; d < size_; ++d) wait_for((rank_ + d) % size_, full(0));
  }
  stream_.synchronize();
}

bool PeerTransport::handles(const at::Tensor& tensor) const {
  return tensor.device() == arena_.device() && static_cast<int64_t>(tensor.nbytes()) >= settings_.min_bytes &&
         tensor.numel() > 0;
}

WorkPtr PeerTransport::reduce_scatter(at::Tensor& output, at::Tensor& input, ReduceOp op) {
  return previous_->reduce_scatter(output, input, op);
}

WorkPtr PeerTransport::all_reduce(at::Tensor& data, ReduceOp op) { return previous_->all_reduce(data, op); }

WorkPtr PeerTransport::all_gather(at::Tensor& output, at::Tensor& input) {
  if (!handles(input)) return previous_->all_gather(output, input);
  const std::lock_guard<std::mutex> lock(mutex_);
  const StreamFork fork(stream_);
  gather(output, input);
  return nullptr;
}

WorkPtr PeerTransport::all_to_all(at::Tensor& output, at::Tensor& input, std::vector<int64_t> output_counts,
                                  std::vector<int64_t> input_counts) {
  if (output.device() != arena_.device()) {
    return previous_->all_to_all(output, input, std::move(output_counts), std::move(input_counts));
  }
  std::vector<Message> sends;
  std::vector<Message> receives;
  int64_t sent = 0;
  int64_t received = 0;
  for (int64_t peer = 0; peer < size_; ++peer) {
    const at::Tensor to = flat_view(input, sent, input_counts[peer]);
    const at::Tensor from = flat_view(output, received, output_counts[peer]);
    sent += input_counts[peer];
    received += output_counts[peer];
    if (peer == rank_) {
      if (from.numel() > 0) at::Tensor(from).copy_(to);
      continue;
    }
    if (to.numel() > 0) sends.push_back({peer, to});
    if (from.numel() > 0) receives.push_back({peer, from});
  }
  if (sends.empty() && receives.empty()) return nullptr;
  for (const WorkPtr& work : send_receive(sends, receives)) {
    if (work) work->wait();  // the current stream waits, not the host
  }
  return nullptr;
}

std::vector<WorkPtr> PeerTransport::send_receive(std::vector<Message>& sends, std::vector<Message>& receives) {
  // Removes the messages that this transport handles from a list and returns them. Sender and receiver of a message
  // decide equally, because the decision depends on the size of the message.
  const auto take_handled = [this](std::vector<Message>& messages) {
    const auto is_delegated = [this](const Message& message) { return !handles(message.data); };
    const auto own = std::stable_partition(messages.begin(), messages.end(), is_delegated);
    std::vector<Message> taken(std::make_move_iterator(own), std::make_move_iterator(messages.end()));
    messages.erase(own, messages.end());
    return taken;
  };
  const Rounds to_send = rounds_of(take_handled(sends));
  const Rounds to_receive = rounds_of(take_handled(receives));
  std::vector<WorkPtr> works;
  if (!sends.empty() || !receives.empty()) works = previous_->send_receive(sends, receives);
  if (to_send.empty() && to_receive.empty()) return works;
  const std::lock_guard<std::mutex> lock(mutex_);
  const StreamFork fork(stream_);
  exchange(to_send, to_receive);
  return works;
}

std::optional<std::string> PeerTransport::why_no_offers(c10::Device device, int64_t bytes) const {
  if (device != this->device())
    return concat("the process group's arenas are on ", this->device().str(), ", not ", device.str());
  if (bytes <= settings_.arena_bytes) return std::nullopt;
  return concat("each part has ", bytes, " bytes, but the process group's arenas have ", settings_.arena_bytes,
                " bytes");
}

void PeerTransport::offer(const at::Tensor& input) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const StreamFork fork(stream_);
  for (int64_t d = 1; d < size_; ++d) {
    for (size_t round = 0; round < kSlots; ++round) wait_for((rank_ + d) % size_, free(round));
  }
  const at::Tensor part = bytes_of(input);
  flat_view(arenas_[rank_], 0, part.numel()).copy_(part);
  for (int64_t d = 1; d < size_; ++d) signal((rank_ + d) % size_, full(0));
  for (int64_t d = 1; d < size_; ++d) wait_for((rank_ + d) % size_, full(0));
}

void PeerTransport::fetch(at::Tensor& output, const at::Tensor& flags) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const StreamFork fork(stream_);
  const at::Tensor all = bytes_of(output);
  const int64_t chunks_per_part = flags.numel() / size_;
  const int64_t chunk = all.numel() / flags.numel();  // bytes
  for (int64_t c = 0; c < chunks_per_part; ++c) set_flag(flags, rank_ * chunks_per_part + c);
  for (int64_t d = 1; d < size_; ++d) {
    const int64_t peer = (rank_ + d) % size_;
    for (int64_t c = 0; c < chunks_per_part; ++c) {
      const int64_t chunk_index = peer * chunks_per_part + c;
      flat_view(all, chunk_index * chunk, chunk).copy_(flat_view(arenas_[peer], c * chunk, chunk));
      set_flag(flags, chunk_index);
      peer_bytes() += chunk;
    }
  }
  for (int64_t d = 1; d < size_; ++d) {
    for (size_t round = 0; round < kSlots; ++round) signal((rank_ + d) % size_, free(round));
  }
}

PeerTransport::Rounds PeerTransport::rounds_of(const std::vector<Message>& messages) const {
  Rounds rounds;
  std::vector<size_t> next(size_, 0);
  for (const Message& message : messages) {
    const at::Tensor bytes = bytes_of(message.data);
    for (int64_t begin = 0; begin < bytes.numel(); begin += slot_bytes_) {
      const size_t round = next[message.peer]++;
      if (rounds.size() <= round) rounds.emplace_back();
      const int64_t count = std::min(slot_bytes_, bytes.numel() - begin);
      rounds[round].push_back({message.peer, flat_view(bytes, begin, count)});
    }
  }
  return rounds;
}

void PeerTransport::exchange(const Rounds& sends, const Rounds& receives) {
  const auto fill_for = [&](size_t round) {
    if (round >= sends.size()) return;
    for (const Message& message : sends[round]) fill(message, round);
  };
  fill_for(0);
  for (size_t round = 0; round < std::max(sends.size(), receives.size()); ++round) {
    fill_for(round + 1);
    if (round >= receives.size()) continue;
    for (const Message& message : receives[round]) read(message, round, rank_);
  }
}

void PeerTransport::gather(at::Tensor& output, at::Tensor& input) {
  const at::Tensor part = bytes_of(input);
  const at::Tensor all = bytes_of(output);
  const int64_t part_bytes = part.numel();
  const auto rounds = static_cast<size_t>((part_bytes + slot_bytes_ - 1) / slot_bytes_);
  const auto count_in = [&](size_t round) {
    return std::min(slot_bytes_, part_bytes - static_cast<int64_t>(round) * slot_bytes_);
  };
  const auto fill_for = [&](size_t round) {
    if (round >= rounds) return;
    for (int64_t d = 1; d < size_; ++d) wait_for((rank_ + d) % size_, free(round));
    const int64_t count = count_in(round);
    slot(rank_, rank_, round, count).copy_(flat_view(part, static_cast<int64_t>(round) * slot_bytes_, count));
    for (int64_t d = 1; d < size_; ++d) signal((rank_ + d) % size_, full(round));
  };
  fill_for(0);
  at::Tensor own = flat_view(all, rank_ * part_bytes, part_bytes);
  if (own.data_ptr() != part.data_ptr()) own.copy_(part);
  for (size_t round = 0; round < rounds; ++round) {
    fill_for(round + 1);
    for (int64_t d = 1; d < size_; ++d) {
      const int64_t peer = (rank_ + d) % size_;
      const int64_t begin = peer * part_bytes + static_cast<int64_t>(round) * slot_bytes_;
      read({peer, flat_view(all, begin, count_in(round))}, round, peer);
    }
  }
}

void PeerTransport::fill(const Message& message, size_t round) {
  wait_for(message.peer, free(round));
  slot(rank_, message.peer, round, message.data.numel()).copy_(message.data);
  signal(message.peer, full(round));
}

void PeerTransport::read(const Message& message, size_t round, int64_t row) {
  wait_for(message.peer, full(round));
  at::Tensor(message.data).copy_(slot(message.peer, row, round, message.data.numel()));
  signal(message.peer, free(round));
  peer_bytes() += message.data.numel();
}

at::Tensor PeerTransport::slot(int64_t owner, int64_t row, size_t round, int64_t bytes) const {
  const int64_t slot_index = row * kSlots + static_cast<int64_t>(round % kSlots);
  return flat_view(arenas_[owner], slot_index * slot_bytes_, bytes);
}

void PeerTransport::wait_for(int64_t peer, int channel) {
  memory_->wait_signal(static_cast<int>(peer), channel, static_cast<size_t>(settings_.timeout.count()));
}

void PeerTransport::signal(int64_t peer, int channel) {
  memory_->put_signal(static_cast<int>(peer), channel, static_cast<size_t>(settings_.timeout.count()));
}

}  // namespace shardwright
