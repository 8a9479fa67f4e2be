#include "simulate/machine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "program/copy_boxes.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kUnwritten = std::numeric_limits<double>::quiet_NaN();

// What a member gives to a collective.
BufferRange given_range(const Operation& operation) {
  if (const auto* o = std::get_if<AllGather>(&operation)) return o->src;
  if (const auto* o = std::get_if<ReduceScatter>(&operation)) return o->src;
  if (const auto* o = std::get_if<AllReduce>(&operation)) return o->data;
  return std::get<AllToAll>(operation).src;
}

// What was copied, where it is now.
void divide_box(const Box& box, std::vector<double>& dst, double divisor) {
  if (divisor == 1) return;
  std::vector<int64_t> at(box.sizes.size(), 0);
  while (true) {
    int64_t place = box.dst_offset;
    for (size_t d = 0; d < at.size(); ++d) place += at[d] * box.dst_strides[d];
    dst[place] /= divisor;
    size_t d = at.size();
    while (d > 0 && ++at[d - 1] == box.sizes[d - 1]) at[--d] = 0;
    if (d == 0) return;
  }
}

}  // namespace

double combine(ReduceOp op, double a, double b) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kNorm:
      return a + b;
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kProduct:
      return a * b;
    case ReduceOp::kBitAnd:
      return static_cast<double>(static_cast<int64_t>(a) & static_cast<int64_t>(b));
    case ReduceOp::kBitOr:
      return static_cast<double>(static_cast<int64_t>(a) | static_cast<int64_t>(b));
    case ReduceOp::kBitXor:
      return static_cast<double>(static_cast<int64_t>(a) ^ static_cast<int64_t>(b));
  }
  return kUnwritten;
}

Machine::Machine(std::vector<Program> programs, std::vector<std::vector<Payload>> inputs)
    : programs_(std::move(programs)), ranks_(programs_.size()) {
  for (size_t p = 0; p < ranks_.size(); ++p) {
    Rank& rank = ranks_[p];
    rank.buffers.resize(programs_[p].buffer_counts.size());
    rank.alive.assign(programs_[p].buffer_counts.size(), false);
    check_invariant(inputs[p].size() == programs_[p].input_shapes.size(), "position ", p, " is given ",
                    inputs[p].size(), " inputs for ", programs_[p].input_shapes.size());
    for (size_t i = 0; i < inputs[p].size(); ++i) {
      rank.buffers[i] = std::move(inputs[p][i]);
      rank.alive[i] = true;
    }
    rank.lifetimes = programs_[p].lifetimes();
  }
}

void Machine::run() {
  bool progressed = true;
  while (progressed) {
    progressed = false;
    for (size_t p = 0; p < ranks_.size(); ++p) {
      while (advance(static_cast<int64_t>(p))) progressed = true;
    }
  }
  for (size_t p = 0; p < ranks_.size(); ++p) {
    const size_t at = ranks_[p].next_instruction;
    check_invariant(at == programs_[p].instructions.size(), "position ", p, " waits forever at instruction ", at,
                    " of\n", programs_[p].to_string());
  }
}

const Machine::Payload& Machine::output(int64_t position, size_t index) const {
  return ranks_[position].buffers[programs_[position].outputs[index].buffer];
}

bool Machine::advance(int64_t position) {
  Rank& rank = ranks_[position];
  const Program& program = programs_[position];
  const size_t at = rank.next_instruction;
  if (at == program.instructions.size()) return false;
  for (const int b : rank.lifetimes.begins[at]) {
    if (rank.alive[b]) continue;  // a Wait is tried again
    rank.alive[b] = true;
    rank.buffers[b].assign(program.buffer_counts[b], kUnwritten);
    rank.live_bytes += program.size_bytes(b);
  }
  rank.peak_bytes = std::max(rank.peak_bytes, rank.live_bytes);

  const Operation& operation = program.instructions[at].operation;
  if (const auto* wait = std::get_if<Wait>(&operation)) {
    if (!finish_wait(position, wait->ticket)) return false;
  } else if (is_communication(operation)) {
    start(position, static_cast<int>(at));
  } else {
    execute(position, operation);
  }

  for (const int b : rank.lifetimes.ends[at]) {
    rank.live_bytes -= program.size_bytes(b);
    rank.alive[b] = false;
    Payload().swap(rank.buffers[b]);
  }
  ++rank.next_instruction;
  return true;
}

void Machine::start(int64_t position, int instruction) {
  Rank& rank = ranks_[position];
  const Operation& operation = programs_[position].instructions[instruction].operation;
  const Group& group = programs_[position].groups[group_of(operation)];
  if (const auto* o = std::get_if<SendReceive>(&operation)) {
    for (const auto& message : o->sends) {
      const Route route{group.positions, position, group.positions[message.peer]};
      mail_[{route, rank.sent[route]++}] = read(position, message.range);
    }
    for (const auto& message : o->receives) {
      const Route route{group.positions, group.positions[message.peer], position};
      rank.messages_of_ticket[instruction].push_back(rank.expected[route]++);
    }
    return;
  }
  const int64_t call = rank.calls[group.positions]++;
  rank.call_of_ticket[instruction] = call;
  Given given{read(position, given_range(operation)), {}};
  if (const auto* o = std::get_if<AllToAll>(&operation)) given.send_counts = o->send_counts;
  given_[{group.positions, call}][position] = std::move(given);
}

bool Machine::finish_wait(int64_t position, int ticket) {
  const Operation& operation = programs_[position].instructions[ticket].operation;
  if (const auto* o = std::get_if<SendReceive>(&operation)) return receive_messages(position, *o, ticket);
  const Group& group = programs_[position].groups[group_of(operation)];
  const auto& given = given_[{group.positions, ranks_[position].call_of_ticket[ticket]}];
  if (given.size() != group.positions.size()) return false;
  deliver(position, operation, given);
  return true;
}

bool Machine::receive_messages(int64_t position, const SendReceive& operation, int ticket) {
  const Group& group = programs_[position].groups[operation.group];
  std::vector<std::map<std::pair<Route, int64_t>, Payload>::iterator> arrived;
  for (size_t i = 0; i < operation.receives.size(); ++i) {
    const Route route{group.positions, group.positions[operation.receives[i].peer], position};
    arrived.push_back(mail_.find({route, ranks_[position].messages_of_ticket[ticket][i]}));
    if (arrived.back() == mail_.end()) return false;
  }
  for (size_t i = 0; i < operation.receives.size(); ++i) {
    const auto& message = operation.receives[i];
    write(position, message.range, arrived[i]->second);
    mail_.erase(arrived[i]);
    ranks_[position].received_bytes +=
        message.range.count * programs_[position].dtype_of(message.range.buffer).size_bytes();
  }
  return true;
}

void Machine::deliver(int64_t position, const Operation& operation, const std::map<int64_t, Given>& given) {
  const Program& program = programs_[position];
  const Group& group = program.groups[group_of(operation)];
  const auto k = static_cast<int64_t>(group.positions.size());
  const int64_t item = program.dtype_of(given_range(operation).buffer).size_bytes();
  int64_t& received = ranks_[position].received_bytes;
  const auto reduced = [&](ReduceOp op, int64_t offset, int64_t count) {
    Payload result;
    for (const int64_t member : group.positions) {
      const double* part = given.at(member).values.data() + offset;
      if (result.empty()) {
        result.assign(part, part + count);
      } else {
        for (int64_t i = 0; i < count; ++i) result[i] = combine(op, result[i], part[i]);
      }
    }
    return result;
  };

  if (const auto* o = std::get_if<AllGather>(&operation)) {
    Payload all;
    for (const int64_t member : group.positions) {
      const Payload& part = given.at(member).values;
      check_invariant(static_cast<int64_t>(part.size()) == o->src.count, "uneven parts in an all_gather");
      all.insert(all.end(), part.begin(), part.end());
    }
    write(position, o->dst, all);
    received += (k - 1) * o->src.count * item;
  } else if (const auto* o = std::get_if<ReduceScatter>(&operation)) {
    write(position, o->dst, reduced(o->op, group.index * o->dst.count, o->dst.count));
    received += (k - 1) * o->dst.count * item;
  } else if (const auto* o = std::get_if<AllReduce>(&operation)) {
    write(position, o->data, reduced(o->op, 0, o->data.count));
    received += (2 * o->data.count * item * (k - 1) + k - 1) / k;
  } else {
    const auto& move = std::get<AllToAll>(operation);
    Payload all;
    for (int64_t m = 0; m < k; ++m) {
      const int64_t sender = group.positions[m];
      const Given& part = given.at(sender);
      int64_t offset = 0;
      for (int64_t j = 0; j < group.index; ++j) offset += part.send_counts.at(j);
      check_invariant(part.send_counts.at(group.index) == move.receive_counts[m], "all_to_all counts disagree");
      all.insert(all.end(), part.values.begin() + offset, part.values.begin() + offset + move.receive_counts[m]);
      if (m != group.index) received += move.receive_counts[m] * item;
    }
    write(position, move.dst, all);
  }
}

void Machine::execute(int64_t position, const Operation& operation) {
  if (const auto* o = std::get_if<Copy>(&operation)) {
    const Rank& rank = ranks_[position];
    check_invariant(rank.alive[o->src] && rank.alive[o->dst], "copy touches memory that is not there");
    copy_boxes(o->boxes, rank.buffers[o->src].data(), ranks_[position].buffers[o->dst].data(), sizeof(double));
    for (const Box& box : o->boxes) divide_box(box, ranks_[position].buffers[o->dst], o->divisor);
  } else if (const auto* o = std::get_if<FillZero>(&operation)) {
    write(position, o->dst, Payload(o->dst.count, 0.0));
  } else if (const auto* o = std::get_if<Divide>(&operation)) {
    Payload values = read(position, o->dst);
    for (double& value : values) value /= o->divisor;
    write(position, o->dst, values);
  } else if (const auto* o = std::get_if<Power>(&operation)) {
    Payload values = read(position, o->src);
    for (double& value : values) value = std::pow(value, o->exponent);
    write(position, o->dst, values);
  } else if (const auto* o = std::get_if<Cast>(&operation)) {
    write(position, o->dst, read(position, o->src));
  } else if (const auto* o = std::get_if<Gemm>(&operation)) {
    multiply(position, *o);
  } else {
    const auto& reduce = std::get<Reduce>(operation);
    Payload result = read(position, reduce.parts[0]);
    for (size_t m = 1; m < reduce.parts.size(); ++m) {
      const Payload part = read(position, reduce.parts[m]);
      check_invariant(part.size() == result.size(), "reduce has parts of different sizes");
      for (size_t i = 0; i < part.size(); ++i) result[i] = combine(reduce.op, result[i], part[i]);
    }
    for (double& value : result) value /= reduce.divisor;
    write(position, reduce.dst, result);
  }
}

void Machine::multiply(int64_t position, const Gemm& gemm) {
  check_invariant(!programs_[position].is_input(gemm.dst.buffer), "an input is written");
  const auto element = [&](const Matrix& matrix, int64_t base, int64_t i, int64_t j) {
    return data(position, {matrix.buffer, matrix.offset + base + i * matrix.row_stride + j * matrix.column_stride, 1});
  };
  const auto factor = [&](const std::optional<Scale>& scale, int64_t i) {
    return scale ? *data(position, {scale->buffer, scale->offset + i * scale->stride, 1}) : 1.0;
  };
  for (int64_t b = 0; b < gemm.count; ++b) {
    for (int64_t i = 0; i < gemm.m; ++i) {
      for (int64_t j = 0; j < gemm.n; ++j) {
        double* dst = element(gemm.dst, b * gemm.dst_batch_stride, i, j);
        double sum = 0;
        for (int64_t k = 0; k < gemm.k; ++k) {
          sum +=
              *element(gemm.lhs, b * gemm.lhs_batch_stride, i, k) * *element(gemm.rhs, b * gemm.rhs_batch_stride, k, j);
        }
        sum *= factor(gemm.lhs_scale, i) * factor(gemm.rhs_scale, j);
        if (gemm.accumulates) sum += *dst;
        if (gemm.bias) sum += *element(*gemm.bias, 0, i, j);
        *dst = sum;
      }
    }
  }
}

double* Machine::data(int64_t position, const BufferRange& range) {
  Rank& rank = ranks_[position];
  check_invariant(rank.alive[range.buffer], "buffer ", range.buffer, " is touched outside its life");
  check_invariant(
      range.offset >= 0 && range.offset + range.count <= static_cast<int64_t>(rank.buffers[range.buffer].size()),
      "buffer ", range.buffer, " is touched outside its bounds");
  return rank.buffers[range.buffer].data() + range.offset;
}

Machine::Payload Machine::read(int64_t position, const BufferRange& range) {
  const double* begin = data(position, range);
  return Payload(begin, begin + range.count);
}

void Machine::write(int64_t position, const BufferRange& range, const Payload& payload) {
  check_invariant(!programs_[position].is_input(range.buffer), "an input is written");
  check_invariant(static_cast<int64_t>(payload.size()) == range.count, "a transfer has ", payload.size(),
                  " elements for a place of ", range.count);
  std::copy(payload.begin(), payload.end(), data(position, range));
}

}  // namespace shardwright
