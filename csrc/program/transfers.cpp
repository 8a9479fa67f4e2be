#include "program/transfers.h"

#include <algorithm>

#include "moves/collectives.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Rounds up to a multiple of `alignment`.
int64_t aligned(int64_t count, int64_t alignment) { return (count + alignment - 1) / alignment * alignment; }

}  // namespace

// ---- Messages

Messages::Message Messages::make_message(int64_t peer, std::vector<TransferItem> items) const {
  Message message{peer, std::move(items)};
  for (const TransferItem& item : message.items) message.count += item.elements.count();
  message.run = run_of(message.items);
  return message;
}

void Messages::insert(int64_t peer, std::vector<TransferItem> items) {
  const auto before =
      std::find_if(messages_.begin(), messages_.end(), [&](const Message& other) { return other.peer > peer; });
  messages_.insert(before, make_message(peer, std::move(items)));
}

void Messages::add_placed(int64_t peer, BufferRange range) {
  if (messages_.empty()) empty_run_ = {range.buffer, range.offset, 0};
  messages_.push_back({peer, {}, range.count, range, range});
}

void Messages::remove(int64_t peer) {
  std::erase_if(messages_, [&](const Message& message) { return message.peer == peer; });
}

std::optional<BufferRange> Messages::run_of(const std::vector<TransferItem>& items) const {
  std::optional<BufferRange> run;
  for (const TransferItem& item : items) {
    if (item.tensor == kMissingBuffer) return std::nullopt;
    if (item.elements.count() == 0) continue;
    const int64_t at =
        side_ == Side::kSent ? item.elements.contiguous_in_sender() : item.elements.contiguous_in_receiver();
    if (at < 0) return std::nullopt;
    if (!run) run = BufferRange{item.tensor, at, 0};
    if (run->buffer != item.tensor || run->offset + run->count != at) return std::nullopt;
    run->count += item.elements.count();
  }
  if (!run && !items.empty()) return BufferRange{items[0].tensor, 0, 0};
  return run;
}

std::optional<BufferRange> Messages::run_of_all() const {
  BufferId tensor = tensor_;
  RunOfMessages all;
  for (const Message& message : messages_) {
    if (!message.run) return std::nullopt;
    if (tensor == kMissingBuffer || (all.total() == 0 && message.count > 0)) tensor = message.run->buffer;
    all.add(message.count, message.run->offset, message.run->buffer == tensor);
  }
  if (tensor == kMissingBuffer || !all.is_run()) return std::nullopt;
  return BufferRange{tensor, all.first(), all.total()};
}

int64_t Messages::total_count() const {
  int64_t total = 0;
  for (const Message& message : messages_) total += message.count;
  return total;
}

bool Messages::are_equally_long() const {
  return std::all_of(messages_.begin(), messages_.end(),
                     [&](const Message& message) { return message.count == messages_[0].count; });
}

int64_t Messages::staged_count(const Staging& staging) const {
  const bool all_stay = staging.is_one_run && staging.may_stay && run_of_all();
  int64_t count = 0;
  for (const Message& message : messages_) {
    const bool stays = staging.is_one_run ? all_stay : staging.may_stay && message.run;
    if (!stays) count += aligned(message.count, staging.alignment);
  }
  return count;
}

void Messages::choose_memory(ProgramBuilder& builder, const Staging& staging) {
  const std::optional<BufferRange> run = staging.is_one_run && staging.may_stay ? run_of_all() : std::nullopt;
  const int64_t staged = staged_count(staging);
  const bool makes_buffer = !run && staging.memory != Staging::Memory::kApart && (staged > 0 || staging.is_one_run);
  BufferRange memory = staging.given;
  if (makes_buffer && (staging.memory == Staging::Memory::kShared || staged == 0)) {
    memory = builder.whole(builder.new_buffer(staged));
  }
  int64_t next = memory.offset;
  for (Message& message : messages_) {
    const bool stays = staging.is_one_run ? run.has_value() : staging.may_stay && message.run;
    message.is_staged = !stays;
    if (stays) {
      message.range = *message.run;
    } else if (staging.memory == Staging::Memory::kApart) {
      message.range = builder.whole(builder.new_buffer(message.count));
    } else {
      message.range = {memory.buffer, next, message.count};
      next += aligned(message.count, staging.alignment);
    }
  }
  empty_run_ = run ? BufferRange{run->buffer, run->offset, 0} : BufferRange{memory.buffer, memory.offset, 0};
}

bool Messages::is_any_staged() const {
  return std::any_of(messages_.begin(), messages_.end(), [](const Message& message) { return message.is_staged; });
}

BufferRange Messages::run() const {
  BufferRange all = empty_run_;
  for (const Message& message : messages_) {
    if (message.count == 0) continue;
    if (all.count == 0) all = {message.range.buffer, message.range.offset, 0};
    check_invariant(all.buffer == message.range.buffer && all.offset + all.count == message.range.offset,
                    "the messages of a collective are not one run");
    all.count += message.count;
  }
  return all;
}

std::vector<SendReceive::Message> Messages::as_sent_or_received() const {
  std::vector<SendReceive::Message> all;
  for (const Message& message : messages_) {
    if (message.count > 0) all.push_back({message.peer, message.range});
  }
  return all;
}

std::vector<int64_t> Messages::counts(int64_t group_size) const {
  std::vector<int64_t> counts(group_size, 0);
  for (const Message& message : messages_) counts[message.peer] = message.count;
  return counts;
}

void Messages::copy(ProgramBuilder& builder, int64_t except) const {
  std::vector<Box> boxes;
  BufferId tensor = kMissingBuffer;
  BufferId staging = kMissingBuffer;
  // Emits the boxes collected so far, which copy between `tensor` and `staging`.
  const auto emit = [&] {
    side_ == Side::kSent ? builder.copy(tensor, staging, std::move(boxes))
                         : builder.copy(staging, tensor, std::move(boxes));
    boxes.clear();
  };
  for (const Message& message : messages_) {
    if (!message.is_staged || message.peer == except) continue;
    int64_t offset = message.range.offset;
    for (const TransferItem& item : message.items) {
      if (item.tensor != kMissingBuffer) {
        if (item.tensor != tensor || message.range.buffer != staging) emit();
        tensor = item.tensor;
        staging = message.range.buffer;
        append(boxes, side_ == Side::kSent ? item.elements.boxes(CopySide::local(), CopySide::packed(offset))
                                           : item.elements.boxes(CopySide::packed(offset), CopySide::local()));
      }
      offset += item.elements.count();
    }
  }
  emit();
}

// ---- Lowering

namespace {

// Starts the transfer of a set whose two sides are given separately.
Ticket start(ProgramBuilder& builder, int group, const Messages& sends, const Messages& receives,
             TransferMethod transfer_method) {
  const auto group_size = static_cast<int64_t>(builder.program().groups[group].ranks.size());
  switch (transfer_method) {
    case TransferMethod::kAllGather:
      return builder.emit(AllGather{group, sends.run(), receives.run()});
    case TransferMethod::kAllToAll:
      return builder.emit(AllToAll{group, sends.run(), receives.run(), sends.counts(group_size),
                                   receives.counts(group_size), builder.exchanges_by_messages()});
    case TransferMethod::kMessages:
      return builder.send_receive({group, sends.as_sent_or_received(), receives.as_sent_or_received()});
  }
  throw InvariantError("no instruction implements this transfer method");
}

}  // namespace

Ticket start(ProgramBuilder& builder, const TransferSet& set, TransferMethod transfer_method) {
  return start(builder, set.group, set.sends, set.receives, transfer_method);
}

namespace {

// Adds this rank's own part to both sides of the set, as a message to itself, if that saves packing or if the method is
// an all-gather. Returns true if it did. `me` is this rank's index in the group.
bool try_add_own(TransferSet& set, TransferMethod transfer_method, const std::vector<OwnItem>& own,
                 const Staging& staging, int64_t me) {
  std::vector<TransferItem> sent;
  std::vector<TransferItem> received;
  int64_t own_count = 0;
  for (const OwnItem& item : own) {
    sent.push_back({item.from, item.elements});
    received.push_back({item.to, item.elements});
    own_count += item.elements.count();
  }
  const auto num_staged = [&] { return set.sends.staged_count(staging) + set.receives.staged_count(staging); };
  const int64_t staged_without = num_staged();
  set.sends.insert(me, std::move(sent));
  set.receives.insert(me, std::move(received));
  if (transfer_method == TransferMethod::kAllGather || sends_own_part(num_staged(), staged_without, own_count))
    return true;
  set.sends.remove(me);
  set.receives.remove(me);
  return false;
}

// Emits the local copies of elements that stay on this rank.
void copy_own(ProgramBuilder& builder, const std::vector<OwnItem>& own) {
  for (const OwnItem& item : own)
    builder.copy(item.from, item.to, item.elements.boxes(CopySide::local(), CopySide::local()));
}

// Emits an all-gather: every rank sends its full buffer. Messages are received in the result or in staging memory.
void emit_all_gather(ProgramBuilder& builder, TransferSet& set, const std::vector<OwnItem>& own, int64_t me) {
  check_invariant(own.size() == 1, "an all-gather has ", own.size(), " tensors instead of one");
  set.receives.choose_memory(builder, {.is_one_run = true});
  Messages everything(Messages::Side::kSent);
  everything.add_placed(me, builder.whole(own[0].from));
  const Ticket ticket = start(builder, set.group, everything, set.receives, TransferMethod::kAllGather);
  if (set.receives.is_any_staged()) copy_own(builder, own);
  builder.wait(ticket);
  set.receives.copy(builder, me);
}

}  // namespace

void exchange(ProgramBuilder& builder, TransferSet set, TransferMethod transfer_method, const std::vector<OwnItem>& own,
              bool may_send_own) {
  const int64_t me = builder.program().groups[set.group].index;
  const Staging staging{.is_one_run = transfer_method != TransferMethod::kMessages};
  const bool may_add_own =
      transfer_method == TransferMethod::kAllGather || (transfer_method == TransferMethod::kAllToAll && may_send_own);
  const bool sends_own = may_add_own && try_add_own(set, transfer_method, own, staging, me);
  if (transfer_method == TransferMethod::kAllGather) return emit_all_gather(builder, set, own, me);
  set.sends.choose_memory(builder, staging);
  set.receives.choose_memory(builder, staging);
  set.sends.copy(builder);
  const Ticket ticket = start(builder, set, transfer_method);
  if (!sends_own) copy_own(builder, own);
  builder.wait(ticket);
  set.receives.copy(builder);
}

std::function<void()> start_sum(ProgramBuilder& builder, const Step& step, int group, const Messages& contributions,
                                bool equally_long, BufferRange result) {
  const ReductionSpec reduction = reduction_of(step);
  if (equally_long && reduces_natively(step, builder.lowering())) {
    const Ticket ticket = builder.emit(ReduceScatter{group, reduction.op, contributions.run(), result});
    return [&builder, ticket, reduction, result] {
      builder.wait(ticket);
      finish_native(builder, reduction, result);
    };
  }
  const auto k = static_cast<int64_t>(builder.program().groups[group].ranks.size());
  const BufferId staging = builder.new_buffer(result.count * k);
  Messages received(Messages::Side::kReceived);
  for (int64_t m = 0; m < k; ++m) received.add_placed(m, {staging, m * result.count, result.count});
  const Ticket ticket = start(builder, group, contributions, received, TransferMethod::kAllToAll);
  return [&builder, ticket, reduction, result, staging, group] {
    builder.wait(ticket);
    if (result.count == 0) return;
    reduce_parts(builder, reduction, contributions_in(builder, reduction, staging, result.count, group), result);
  };
}

}  // namespace shardwright
