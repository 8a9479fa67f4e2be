#include "process_group.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <algorithm>
#include <mutex>
#include <numeric>
#include <utility>

#include "reductions.h"

namespace async_device {
namespace {

std::mutex counters_mutex;
std::map<std::string, int64_t>& all_counters() {
  static auto* counters = new std::map<std::string, int64_t>;
  return *counters;
}

void count(const std::string& name, int64_t by = 1) {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  all_counters()[name] += by;
}

GlooMaker& gloo_maker() {
  static auto* maker = new GlooMaker;
  return *maker;
}

BackendPtr make_gloo(const StorePtr& store, const Place& place, Milliseconds timeout) {
  if (place.size == 1) return nullptr;
  TORCH_CHECK(gloo_maker() != nullptr, "strict: set_gloo_maker has not been called");
  return gloo_maker()(c10::make_intrusive<c10d::PrefixStore>("gloo", store), place.rank, place.size, timeout);
}

class StrictWork final : public c10d::Work {
 public:
  StrictWork(Event end, bool blocks_host) : end_(std::move(end)), blocks_host_(blocks_host) {}

  bool isCompleted() override { return end_.query(); }
  bool isSuccess() const override { return end_.query(); }
  void synchronize() override { end_.block(current_stream()); }
  bool wait(Milliseconds) override {
    synchronize();
    if (blocks_host_) end_.synchronize();
    return true;
  }

 private:
  Event end_;
  bool blocks_host_;
};

// ------------------------------------------------------------------------------------------------- arguments

void check_tensor(const at::Tensor& tensor, const char* what) {
  TORCH_CHECK_VALUE(tensor.device().type() == kDeviceType, "strict: ", what, " takes tensors on ", device(), ", got one on ",
                    tensor.device());
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, "strict: ", what, " takes dense tensors, got ", tensor.layout());
  TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), "strict: ", what,
                    " takes contiguous tensors, got sizes ", tensor.sizes(), " with strides ", tensor.strides());
}

Memory memory_of(const at::Tensor& tensor, const char* what) {
  check_tensor(tensor, what);
  check_dtype(tensor.scalar_type(), what);
  return Memory::of(tensor);
}

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, "strict: ", what, " takes one tensor, got ", tensors.size());
  return tensors.front();
}

const Tensors& only(const std::vector<Tensors>& lists, int size, const char* what) {
  TORCH_CHECK_VALUE(lists.size() == 1 && static_cast<int>(lists.front().size()) == size, "strict: ", what,
                    " takes one list of ", size, " tensors, one per rank");
  return lists.front();
}

void check_same(const Memory& memory, const Memory& other, int64_t count, const char* what) {
  TORCH_CHECK_VALUE(memory.dtype == other.dtype, "strict: ", what, " takes one dtype, got ", memory.dtype, " and ",
                    other.dtype);
  TORCH_CHECK_VALUE(memory.count == count, "strict: ", what, " expects ", count, " elements, got ", memory.count);
}

void check_root(int64_t root, int size, const char* what) {
  TORCH_CHECK_VALUE(root >= 0 && root < size, "strict: ", what, " has root ", root, ", allowed is 0 to ", size - 1);
}

int64_t detail_of(at::ScalarType dtype, int64_t root = 0) { return static_cast<int64_t>(dtype) + 1000 * root; }

std::vector<Memory> equal_parts(const Memory& whole, int num) {
  std::vector<Memory> parts;
  for (int i = 0; i < num; ++i) parts.push_back(whole.part(i * (whole.count / num), whole.count / num));
  return parts;
}

// The parts of all_to_all_single: rows by rank, evenly if there are no splits.
std::vector<Memory> split_parts(const at::Tensor& tensor, const std::vector<int64_t>& splits, int num) {
  const char* what = name_of(Kind::kAllToAll);
  const Memory whole = memory_of(tensor, what);
  const int64_t rows = tensor.dim() == 0 ? 1 : tensor.size(0);
  if (splits.empty()) {
    TORCH_CHECK_VALUE(rows % num == 0, "strict: ", what, " without splits needs rows that ", num, " divides, got ", rows);
    return equal_parts(whole, num);
  }
  TORCH_CHECK_VALUE(static_cast<int>(splits.size()) == num, "strict: ", what, " takes ", num, " splits, got ", splits.size());
  TORCH_CHECK_VALUE(std::accumulate(splits.begin(), splits.end(), int64_t{0}) == rows, "strict: ", what, " has splits ",
                    splits, " of ", rows, " rows");
  const int64_t row = rows == 0 ? 0 : whole.count / rows;
  std::vector<Memory> parts;
  int64_t first = 0;
  for (const int64_t split : splits) {
    parts.push_back(whole.part(first * row, split * row));
    first += split;
  }
  return parts;
}

// Sends `to[r]` to rank r and receives `from[r]` from it.
Moves moves_between(const std::vector<Memory>& to, const std::vector<Memory>& from, int own) {
  Moves moves;
  for (int rank = 0; rank < static_cast<int>(to.size()); ++rank) {
    if (rank == own) continue;
    moves.sends.push_back({rank, to[rank]});
    moves.receives.push_back({rank, from[rank]});
  }
  moves.copies.emplace_back(to[own], from[own]);
  return moves;
}

// A rank's messages to itself do not travel. Throws where one has no counterpart, unless `is_broken`.
Moves without_own(Moves messages, int own, bool is_broken) {
  const auto take_own = [own](std::vector<Message>& all) {
    std::vector<Memory> taken;
    for (const Message& message : all) {
      if (message.peer == own) taken.push_back(message.memory);
    }
    std::erase_if(all, [own](const Message& message) { return message.peer == own; });
    return taken;
  };
  const auto sent = take_own(messages.sends);
  const auto received = take_own(messages.receives);
  if (is_broken) return messages;
  TORCH_CHECK_VALUE(sent.size() == received.size(), "strict: the batch sends ", sent.size(),
                    " messages to its own rank and receives ", received.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    TORCH_CHECK_VALUE(sent[i].bytes() == received[i].bytes(), "strict: a message of a rank to itself has ",
                      sent[i].bytes(), " bytes where ", received[i].bytes(), " are expected");
    messages.copies.emplace_back(sent[i], received[i]);
  }
  return messages;
}

template <typename Pieces>
Communicator::Body in_turn(Pieces pieces) {
  return [pieces = std::move(pieces)](Communicator& communicator) {
    for (const auto& piece : pieces) piece(communicator);
  };
}

}  // namespace

void set_gloo_maker(GlooMaker maker) { gloo_maker() = std::move(maker); }

std::map<std::string, int64_t> counters() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  return all_counters();
}

void reset_counters() {
  const std::lock_guard<std::mutex> lock(counters_mutex);
  std::erase_if(all_counters(), [](const auto& item) { return item.first != "communicators"; });
}

// ------------------------------------------------------------------------------------------- making and ending groups

StrictGroup::StrictGroup(StorePtr store, Place place, Milliseconds timeout, Rules rules)
    : Backend(place.rank, place.size), store_(std::move(store)), place_(std::move(place)), rules_(rules),
      timeout_(timeout) {}

StrictGroup::~StrictGroup() {
  if (!communicator_) return;
  communicator_->close("destroyed", /*finish_first=*/false);
  count("communicators", -1);
}

void StrictGroup::attach(BackendPtr gloo) {
  communicator_ = std::make_shared<Communicator>(place_, store_, std::move(gloo), timeout_);
  own_stream_ = stream_from_pool(rules_.is_high_priority);
  count("communicators");
}

void StrictGroup::connect() {
  if (communicator_) return;
  forbid_in_capture("making the communicator of a process group");
  try {
    meet(store_, place_, "ranks", "", "making the communicator", timeout_);
    attach(make_gloo(store_, place_, timeout_));
  } catch (const c10::Error& error) {
    unusable_ = error.what_without_backtrace();
    throw;
  }
  count("rendezvous");
}

c10::intrusive_ptr<StrictGroup> StrictGroup::split_off(const StorePtr& store, const std::vector<int>& ranks,
                                                       const std::string& name, Milliseconds timeout, Rules rules) {
  check_usable("splitting off a group");
  TORCH_CHECK(!batch_, place_.text(), "splitting off a group while a batch is open");
  connect();
  forbid_in_capture("splitting off a process group");
  const auto own = std::find(ranks.begin(), ranks.end(), place_.rank);
  const std::string color = own == ranks.end() ? "none" : place_.text(ranks);
  const auto colors = meet(store_, place_, "split/" + std::to_string(num_splits_++), color,
                           "splitting off a group" + (name.empty() ? "" : " '" + name + "'"), std::min(timeout, timeout_));
  count("split");
  if (own == ranks.end()) return nullptr;
  Place child{name, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()), {}};
  for (const int rank : ranks) {
    if (colors[rank] != color) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str(place_.text(), "splits off a group of ", color, " while ", place_.text({rank}),
                               colors[rank] == "none" ? " takes no part" : " splits off one of " + colors[rank],
                               "; all ranks must make groups in the same order"));
    }
    child.global_ranks.push_back(place_.global(rank));
  }
  auto group = c10::make_intrusive<StrictGroup>(store, child, timeout, rules);
  group->attach(make_gloo(store, child, timeout));
  return group;
}

c10::intrusive_ptr<c10d::Backend> StrictGroup::split(const StorePtr& store, const std::vector<int>& ranks,
                                                     const c10::intrusive_ptr<Options>& options) {
  return split_off(store, ranks, options->group_name, options->timeout, rules_);
}

c10::intrusive_ptr<c10d::Backend::Options> StrictGroup::getBackendOptions() {
  return c10::make_intrusive<Options>(getBackendName(), timeout_);
}

void StrictGroup::setTimeout(Milliseconds timeout) {
  timeout_ = timeout;
  if (communicator_) communicator_->set_timeout(timeout);
}

void StrictGroup::eagerConnectSingleDevice(at::Device) { connect(); }

void StrictGroup::shutdown() {
  if (communicator_) communicator_->close("destroyed", /*finish_first=*/true);
  if (unusable_.empty()) unusable_ = "the group was destroyed";
}

void StrictGroup::abort() {
  if (communicator_) communicator_->close("aborted", /*finish_first=*/false);
  if (unusable_.empty()) unusable_ = "the group was aborted";
}

// -------------------------------------------------------------------------------------------------------- launching

void StrictGroup::check_usable(const char* what) const {
  TORCH_CHECK(unusable_.empty(), place_.text(), what, " on a group that cannot be used any more: ", unusable_);
  TORCH_CHECK(!batch_ || batch_->broken_by.empty(), place_.text(), what,
              " while a batch is open that was left after an error; call endCoalescing. The error: ",
              batch_ ? batch_->broken_by : "");
}

c10::Stream StrictGroup::stream_for(bool is_async) {
  const c10::Stream current = current_stream();
  if (!is_async || current == *own_stream_) return current;
  Event given;
  given.record(current);
  given.block(*own_stream_);
  return *own_stream_;
}

WorkPtr StrictGroup::launch(const std::vector<c10::Stream>& streams, const std::string& what, Body body, bool is_async,
                            bool blocks_host) {
  const c10::Stream stream = streams.front();
  for (const c10::Stream& other : streams) {
    if (other == stream) continue;
    Event given;
    given.record(other);
    given.block(stream);
  }
  enqueue_at_launch(stream, [communicator = communicator_, what, body = std::move(body)] {
    const uint64_t ticket = communicator->take_ticket();
    return Work([communicator, ticket, what, body] { communicator->run(ticket, what, body); });
  });
  Event end;
  end.record(stream);
  for (const c10::Stream& other : streams) {
    if (!(other == stream)) end.block(other);
  }
  if (!is_async && blocks_host) end.synchronize();
  if (!is_async && !rules_.has_real_work) return nullptr;
  return c10::make_intrusive<StrictWork>(std::move(end), blocks_host || rules_.waits_block_host);
}

template <typename Build>
WorkPtr StrictGroup::collective(Kind kind, bool is_async, Build&& build) {
  const char* what = name_of(kind);
  check_usable(what);
  try {
    TORCH_CHECK(!batch_ || !batch_->has_messages, place_.text(), what,
                " while a batch of messages is open, which was left open or is not meant for collectives");
    Body body = build(what);
    connect();
    count(what);
    const c10::Stream stream = stream_for(is_async);
    if (!batch_) return launch({stream}, what, std::move(body), is_async, kind == Kind::kBarrier);
    batch_->collectives.push_back(std::move(body));
    batch_->streams.push_back(stream);
    batch_->is_async = batch_->is_async || is_async;
  } catch (const std::exception& error) {
    if (batch_) batch_->broken_by = error.what();
    throw;
  }
  return nullptr;
}

WorkPtr StrictGroup::message(Tensors& tensors, int peer, bool is_send) {
  const char* what = is_send ? "send" : "recv";
  check_usable(what);
  TORCH_CHECK(batch_, place_.text(), what, " outside of a batch: messages go between startCoalescing and endCoalescing");
  try {
    TORCH_CHECK(batch_->collectives.empty(), place_.text(), what, " in a batch of collectives");
    const at::Tensor& tensor = only(tensors, what);
    const Memory memory = memory_of(tensor, what);
    check_root(peer, size_, what);
    connect();
    count(what);
    const c10::Stream stream = stream_for(/*is_async=*/true);
    if (rules_.records_streams) {
      c10::impl::VirtualGuardImpl(kDeviceType).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
    }
    (is_send ? batch_->messages.sends : batch_->messages.receives).push_back({peer, memory});
    batch_->streams.push_back(stream);
    batch_->is_async = batch_->has_messages = true;
  } catch (const std::exception& error) {
    batch_->broken_by = error.what();
    throw;
  }
  return nullptr;
}

void StrictGroup::startCoalescing() {
  TORCH_CHECK(unusable_.empty(), place_.text(), "a batch on a group that cannot be used any more: ", unusable_);
  TORCH_CHECK(!batch_, place_.text(), "startCoalescing while a batch is open, which was left open or is nested");
  batch_.emplace();
}

WorkPtr StrictGroup::endCoalescing() {
  TORCH_CHECK(batch_, place_.text(), "endCoalescing without startCoalescing");
  Batch batch = std::move(*batch_);
  batch_.reset();
  if (batch.streams.empty()) return nullptr;
  count("batch");
  if (!batch.has_messages) {
    return launch(batch.streams, "a batch of collectives", in_turn(std::move(batch.collectives)), batch.is_async, false);
  }
  const std::string what = c10::str("a batch of ", batch.messages.sends.size(), " sends and ",
                                    batch.messages.receives.size(), " receives");
  Moves moves = without_own(std::move(batch.messages), rank_, !batch.broken_by.empty());
  return launch(batch.streams, what, moving(Kind::kMessages, 0, std::move(moves)), true, false);
}

WorkPtr StrictGroup::send(Tensors& tensors, int peer, int) { return message(tensors, peer, true); }

WorkPtr StrictGroup::recv(Tensors& tensors, int peer, int) { return message(tensors, peer, false); }

// ------------------------------------------------------------------------------------------------------ collectives

StrictGroup::Body StrictGroup::moving(Kind kind, int64_t detail, Moves moves) const {
  return [kind, detail, moves = std::move(moves)](Communicator& communicator) {
    moves.copy();
    communicator.exchange(kind, detail, moves);
  };
}

StrictGroup::Body StrictGroup::gathering(const Tensors& outputs, const at::Tensor& input) const {
  const char* what = name_of(Kind::kAllGather);
  const Memory own = memory_of(input, what);
  std::vector<Memory> from;
  if (outputs.size() == 1 && (size_ > 1 || outputs[0].numel() == input.numel())) {
    const Memory whole = memory_of(outputs[0], what);
    check_same(whole, own, own.count * size_, what);
    from = equal_parts(whole, size_);
  } else {
    for (const at::Tensor& output : outputs) from.push_back(memory_of(output, what));
    for (const Memory& part : from) check_same(part, own, part.count, what);
    check_same(from[rank_], own, own.count, what);
  }
  return moving(Kind::kAllGather, detail_of(own.dtype), moves_between(std::vector<Memory>(size_, own), from, rank_));
}

WorkPtr StrictGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  return collective(Kind::kAllReduce, options.asyncOp, [&](const char* what) {
    const at::Tensor& tensor = only(tensors, what);
    check_tensor(tensor, what);
    return all_reducing(tensor, reduction_of(options.reduceOp, tensor.scalar_type(), true, what), rank_, size_);
  });
}

WorkPtr StrictGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  return collective(Kind::kAllReduce, options.asyncOp, [&](const char* what) {
    std::vector<Body> bodies;
    for (const at::Tensor& tensor : tensors) {
      check_tensor(tensor, what);
      const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), true, what);
      bodies.push_back(all_reducing(tensor, reduction, rank_, size_));
    }
    return in_turn(std::move(bodies));
  });
}

WorkPtr StrictGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  return collective(Kind::kReduce, options.asyncOp, [&](const char* what) {
    const at::Tensor& tensor = only(tensors, what);
    check_tensor(tensor, what);
    check_root(options.rootRank, size_, what);
    const Reduction reduction = reduction_of(options.reduceOp, tensor.scalar_type(), true, what);
    return reducing(tensor, reduction, static_cast<int>(options.rootRank), rank_, size_);
  });
}

WorkPtr StrictGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return collective(Kind::kBroadcast, options.asyncOp, [&](const char* what) {
    at::Tensor tensor = only(tensors, what);
    check_tensor(tensor, what);
    check_root(options.rootRank, size_, what);
    if (tensor.is_complex()) tensor = at::view_as_real(tensor);
    const Memory memory = memory_of(tensor, what);
    Moves moves;
    const int root = static_cast<int>(options.rootRank);
    if (rank_ != root) moves.receives.push_back({root, memory});
    for (int rank = 0; rank_ == root && rank < size_; ++rank) {
      if (rank != root) moves.sends.push_back({rank, memory});
    }
    return moving(Kind::kBroadcast, detail_of(memory.dtype, root), std::move(moves));
  });
}

WorkPtr StrictGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  return collective(Kind::kAllGather, options.asyncOp, [&](const char* what) {
    return gathering(only(outputs, size_, what), only(inputs, what));
  });
}

WorkPtr StrictGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  return collective(Kind::kAllGather, options.asyncOp, [&](const char*) { return gathering({output}, input); });
}

WorkPtr StrictGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::AllgatherOptions& options) {
  return collective(Kind::kAllGather, options.asyncOp, [&](const char* what) {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "strict: ", what, " takes as many outputs as inputs");
    std::vector<Body> bodies;
    for (size_t i = 0; i < inputs.size(); ++i) bodies.push_back(gathering({outputs[i]}, inputs[i]));
    return in_turn(std::move(bodies));
  });
}

WorkPtr StrictGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  return collective(Kind::kReduceScatter, options.asyncOp, [&](const char* what) {
    const Memory output = memory_of(only(outputs, what), what);
    std::vector<Memory> parts;
    for (const at::Tensor& input : only(inputs, size_, what)) parts.push_back(memory_of(input, what));
    for (const Memory& part : parts) check_same(part, output, part.count, what);
    check_same(parts[rank_], output, output.count, what);
    return reduce_scattering(output, parts, reduction_of(options.reduceOp, output.dtype, false, what), rank_);
  });
}

WorkPtr StrictGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  Tensors outputs{output};
  Tensors inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, options);
}

WorkPtr StrictGroup::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  return collective(Kind::kReduceScatter, options.asyncOp, [&](const char* what) {
    TORCH_CHECK_VALUE(outputs.size() == inputs.size(), "strict: ", what, " takes as many outputs as inputs");
    std::vector<Body> bodies;
    for (size_t i = 0; i < inputs.size(); ++i) {
      const Memory output = memory_of(outputs[i], what);
      const Memory input = memory_of(inputs[i], what);
      check_same(input, output, output.count * size_, what);
      const Reduction reduction = reduction_of(options.reduceOp, output.dtype, false, what);
      bodies.push_back(reduce_scattering(output, equal_parts(input, size_), reduction, rank_));
    }
    return in_turn(std::move(bodies));
  });
}

WorkPtr StrictGroup::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                   std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  return collective(Kind::kAllToAll, options.asyncOp, [&](const char* what) {
    const auto to = split_parts(input, input_splits, size_);
    const auto from = split_parts(output, output_splits, size_);
    check_same(from[rank_], to[rank_], to[rank_].count, what);
    return moving(Kind::kAllToAll, detail_of(to[0].dtype), moves_between(to, from, rank_));
  });
}

WorkPtr StrictGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  return collective(Kind::kAllToAll, options.asyncOp, [&](const char* what) {
    std::vector<Memory> to;
    std::vector<Memory> from;
    for (const at::Tensor& input : only({inputs}, size_, what)) to.push_back(memory_of(input, what));
    for (const at::Tensor& output : only({outputs}, size_, what)) from.push_back(memory_of(output, what));
    check_same(from[rank_], to[rank_], to[rank_].count, what);
    return moving(Kind::kAllToAll, detail_of(to[0].dtype), moves_between(to, from, rank_));
  });
}

WorkPtr StrictGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  return collective(Kind::kGather, options.asyncOp, [&](const char* what) {
    check_root(options.rootRank, size_, what);
    const int root = static_cast<int>(options.rootRank);
    const Memory own = memory_of(only(inputs, what), what);
    Moves moves;
    if (rank_ == root) {
      const Tensors& list = only(outputs, size_, what);
      for (int rank = 0; rank < size_; ++rank) {
        const Memory to = memory_of(list[rank], what);
        check_same(to, own, own.count, what);
        if (rank != root) moves.receives.push_back({rank, to});
        if (rank == root) moves.copies.emplace_back(own, to);
      }
    } else {
      TORCH_CHECK_VALUE(outputs.empty(), "strict: ", what, " takes outputs on the root alone");
      moves.sends.push_back({root, own});
    }
    return moving(Kind::kGather, detail_of(own.dtype, root), std::move(moves));
  });
}

WorkPtr StrictGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) {
  return collective(Kind::kScatter, options.asyncOp, [&](const char* what) {
    check_root(options.rootRank, size_, what);
    const int root = static_cast<int>(options.rootRank);
    const Memory own = memory_of(only(outputs, what), what);
    Moves moves;
    if (rank_ == root) {
      const Tensors& list = only(inputs, size_, what);
      for (int rank = 0; rank < size_; ++rank) {
        const Memory from = memory_of(list[rank], what);
        check_same(from, own, own.count, what);
        if (rank != root) moves.sends.push_back({rank, from});
        if (rank == root) moves.copies.emplace_back(from, own);
      }
    } else {
      TORCH_CHECK_VALUE(inputs.empty(), "strict: ", what, " takes inputs on the root alone");
      moves.receives.push_back({root, own});
    }
    return moving(Kind::kScatter, detail_of(own.dtype, root), std::move(moves));
  });
}

WorkPtr StrictGroup::barrier(const c10d::BarrierOptions& options) {
  return collective(Kind::kBarrier, options.asyncOp, [&](const char*) {
    const std::vector<Memory> nothing(size_);
    return moving(Kind::kBarrier, 0, moves_between(nothing, nothing, rank_));
  });
}

}  // namespace async_device
