#include "attention/head_exchange.h"

namespace shardwright {

HeadExchange::HeadExchange(AttentionWriter& writer, HeadSharing sharing) : writer_(writer) {
  for (int64_t p = 0; p < writer_.num_ranks; ++p) {
    shares_.push_back(share_of_heads(writer_.attention, p, writer_.num_ranks, sharing));
  }
}

void HeadExchange::gather(const std::vector<Tensor>& tensors) {
  ProgramBuilder& builder = writer_.builder;
  tensors_ = tensors;
  gathered_.assign(tensors.size(), std::vector<HeadsTensor>(writer_.num_ranks));
  SendReceive move;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const HeadsTensor& local = tensors[t].local;
    const DType dtype = builder.program().dtype_of(local.buffer);
    for (int64_t distance = 1; distance < writer_.num_ranks; ++distance) {
      const int64_t to = writer_.ahead(distance);
      HeadsTensor sent = local;
      sent.heads = num_heads(shares_[to], tensors[t].kind);
      const int64_t head = first_head(shares_[to], tensors[t].kind);
      if (sent.count() > 0) {
        if (local.batch == 1) {
          sent.offset = local.at(head, 0).offset;  // one run of memory
        } else {
          sent.buffer = builder.new_buffer(sent.count(), dtype);
          sent.offset = 0;
          std::vector<Box> boxes;
          append_box(boxes, local, {head, 0}, sent, {}, sent.heads, sent.rows);
          builder.copy(local.buffer, sent.buffer, std::move(boxes));
        }
        move.sends.push_back({writer_.member(to), sent.range()});
      }
      const int64_t from = writer_.behind(distance);
      HeadsTensor& received = gathered_[t][from];
      received = local;
      received.heads = num_heads(own_share(), tensors[t].kind);
      received.rows = rows_of(writer_.attention, tensors[t].kind, from);
      received.offset = 0;
      if (received.count() == 0) continue;
      received.buffer = builder.new_buffer(received.count(), dtype);
      move.receives.push_back({writer_.member(from), received.range()});
    }
  }
  if (move.sends.empty() && move.receives.empty()) return;
  move.group = writer_.group();
  builder.wait(builder.send_receive(std::move(move)));
}

void HeadExchange::gather(const ForwardTensors& t) {
  gather({{t.q, HeadKind::kQueries}, {t.k, HeadKind::kKeys}, {t.v, HeadKind::kKeys}});
}

void HeadExchange::gather(const BackwardTensors& t) {
  gather({{t.q, HeadKind::kQueries},
          {t.k, HeadKind::kKeys},
          {t.v, HeadKind::kKeys},
          {t.out, HeadKind::kQueries},
          {t.dout, HeadKind::kQueries},
          {t.lse, HeadKind::kQueries}});
}

HeadsTensor HeadExchange::joined(size_t tensor) {
  const auto& [local, kind] = tensors_[tensor];
  ProgramBuilder& builder = writer_.builder;
  HeadsTensor all = local;
  all.offset = 0;
  all.heads = num_heads(own_share(), kind);
  all.rows = 0;
  for (int64_t owner = 0; owner < writer_.num_ranks; ++owner) all.rows += rows_of(writer_.attention, kind, owner);
  all.buffer = builder.new_buffer(all.count(), builder.program().dtype_of(local.buffer));
  int64_t row = 0;
  for (int64_t owner = 0; owner < writer_.num_ranks; ++owner) {
    const bool is_mine = owner == writer_.me;
    const HeadsTensor& part = is_mine ? local : gathered_[tensor][owner];
    std::vector<Box> boxes;
    append_box(boxes, part, {is_mine ? first_head(own_share(), kind) : 0, 0}, all, {0, row}, all.heads, part.rows);
    builder.copy(part.buffer, all.buffer, std::move(boxes));
    row += part.rows;
  }
  return all;
}

HeadsOffset HeadExchange::offset_of(size_t tensor, const SequenceBlock& block) const {
  return {block.owner == writer_.me ? first_head(own_share(), tensors_[tensor].kind) : 0, block.row};
}

const HeadsTensor& HeadExchange::tensor_with(size_t tensor, const SequenceBlock& block) const {
  return block.owner == writer_.me ? tensors_[tensor].local : gathered_[tensor][block.owner];
}

Heads HeadExchange::at(size_t tensor, const SequenceBlock& block) const {
  const HeadsOffset offset = offset_of(tensor, block);
  return tensor_with(tensor, block).at(offset.head, offset.row);
}

HeadRows HeadExchange::rows_at(size_t tensor, const SequenceBlock& block) const {
  const HeadsOffset offset = offset_of(tensor, block);
  return tensor_with(tensor, block).rows_at(offset.head, offset.row);
}

HeadExchange::ResultTransfer HeadExchange::start_transfer(int64_t distance, const std::vector<Result>& sent) {
  ProgramBuilder& builder = writer_.builder;
  ResultTransfer transfer;
  transfer.from = writer_.behind(distance);
  SendReceive move;
  for (const Result& part : sent) {
    if (part.tensor.count() > 0) move.sends.push_back({writer_.member(writer_.ahead(distance)), part.tensor.range()});
    HeadsTensor received = part.tensor;
    received.offset = 0;
    received.heads = num_heads(shares_[transfer.from], part.kind);
    received.rows = rows_of(writer_.attention, part.kind, writer_.me);
    if (received.count() > 0) {
      received.buffer = builder.new_buffer(received.count(), builder.program().dtype_of(part.tensor.buffer));
      move.receives.push_back({writer_.member(transfer.from), received.range()});
    }
    transfer.received.push_back({received, part.kind});
  }
  if (move.sends.empty() && move.receives.empty()) return transfer;
  move.group = writer_.group();
  transfer.ticket = builder.send_receive(std::move(move));
  return transfer;
}

void HeadExchange::copy_to(const std::vector<HeadsTensor>& tensors, const ResultTransfer& transfer) {
  writer_.builder.wait(transfer.ticket);
  for (size_t i = 0; i < tensors.size(); ++i) {
    const auto& [from, kind] = transfer.received[i];
    std::vector<Box> boxes;
    append_box(boxes, from, {}, tensors[i], {first_head(shares_[transfer.from], kind), 0}, from.heads, from.rows);
    writer_.builder.copy(from.buffer, tensors[i].buffer, std::move(boxes));
  }
}

void HeadExchange::add_to(const std::vector<HeadsTensor>& sums, const ResultTransfer& transfer) {
  writer_.builder.wait(transfer.ticket);
  for (size_t i = 0; i < sums.size(); ++i) {
    const auto& [from, kind] = transfer.received[i];
    if (from.count() == 0) continue;
    const AttendSizes sizes{from.batch, from.heads, from.heads, from.rows, 0, from.depth, 0};
    const int64_t head = first_head(shares_[transfer.from], kind);
    writer_.builder.emit(Accumulate{sizes, from.at(0, 0), sums[i].at(head, 0)});
  }
}

}  // namespace shardwright
