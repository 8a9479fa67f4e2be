#include "simulate/machine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "program/copy_boxes.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kUnwritten = std::numeric_limits<double>::quiet_NaN();

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
    rank.buffers.resize(programs_[p].buffers.size());
    rank.alive.assign(programs_[p].buffers.size(), false);
    check_invariant(inputs[p].size() == programs_[p].num_inputs(), "position ", p, " is given ", inputs[p].size(),
                    " inputs for ", programs_[p].num_inputs());
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
  for (const BufferId b : rank.lifetimes.begins[at]) {
    if (rank.alive[b]) continue;  // a Wait is tried again
    rank.alive[b] = true;
    rank.buffers[b].assign(program.buffers[b].count, kUnwritten);
    rank.live_bytes += program.size_bytes(b);
  }
  rank.peak_bytes = std::max(rank.peak_bytes, rank.live_bytes);

  const bool is_done = match(
      program.instructions[at].operation, [&](const Wait& o) { return finish_wait(position, o.ticket); },
      [&](const IsTransfer auto& o) {
        start(position, static_cast<int>(at), o);
        return true;
      },
      [&](const IsCompute auto& o) {
        execute(position, o);
        return true;
      });
  if (!is_done) return false;

  for (const BufferId b : rank.lifetimes.ends[at]) {
    rank.live_bytes -= program.size_bytes(b);
    rank.alive[b] = false;
    Payload().swap(rank.buffers[b]);
  }
  ++rank.next_instruction;
  return true;
}

void Machine::start(int64_t position, int instruction, const SendReceive& operation) {
  Rank& rank = ranks_[position];
  const Group& group = programs_[position].groups[operation.group];
  for (const auto& message : operation.sends) {
    const Route route{group.positions, position, group.positions[message.peer]};
    mail_[{route, rank.sent[route]++}] = read(position, message.range);
  }
  for (const auto& message : operation.receives) {
    const Route route{group.positions, group.positions[message.peer], position};
    rank.messages_of_ticket[instruction].push_back(rank.expected[route]++);
  }
}

void Machine::start(int64_t position, int instruction, const AllGather& operation) {
  give(position, instruction, operation.group, {read(position, operation.src), {}});
}

void Machine::start(int64_t position, int instruction, const ReduceScatter& operation) {
  give(position, instruction, operation.group, {read(position, operation.src), {}});
}

void Machine::start(int64_t position, int instruction, const AllReduce& operation) {
  give(position, instruction, operation.group, {read(position, operation.data), {}});
}

void Machine::start(int64_t position, int instruction, const AllToAll& operation) {
  give(position, instruction, operation.group, {read(position, operation.src), operation.send_counts});
}

void Machine::give(int64_t position, int instruction, int group_index, Given given) {
  Rank& rank = ranks_[position];
  const Group& group = programs_[position].groups[group_index];
  const int64_t call = rank.calls[group.positions]++;
  rank.call_of_ticket[instruction] = call;
  given_[{group.positions, call}][position] = std::move(given);
}

bool Machine::finish_wait(int64_t position, int ticket) {
  const auto deliver_collective = [&](const auto& operation) {
    const Group& group = programs_[position].groups[operation.group];
    const auto& given = given_[{group.positions, ranks_[position].call_of_ticket[ticket]}];
    if (given.size() != group.positions.size()) return false;
    deliver(position, operation, given);
    return true;
  };
  const auto nothing_to_wait_for = [&] {
    check_invariant(false, "position ", position, " waits for instruction ", ticket, ", which is no transfer");
    return false;
  };
  return match(
      programs_[position].instructions[ticket].operation,
      [&](const SendReceive& o) { return receive_messages(position, o, ticket); },
      [&](const IsTransfer auto& o) { return deliver_collective(o); },
      [&](const IsCompute auto&) { return nothing_to_wait_for(); }, [&](const Wait&) { return nothing_to_wait_for(); });
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
    ranks_[position].received_bytes += message.range.count * item_bytes(position, message.range);
  }
  return true;
}

void Machine::deliver(int64_t position, const AllGather& operation, const GivenByMember& given) {
  const Group& group = programs_[position].groups[operation.group];
  Payload all;
  for (const int64_t member : group.positions) {
    const Payload& part = given.at(member).values;
    check_invariant(static_cast<int64_t>(part.size()) == operation.src.count, "uneven parts in an all_gather");
    all.insert(all.end(), part.begin(), part.end());
  }
  write(position, operation.dst, all);
  const auto others = static_cast<int64_t>(group.positions.size()) - 1;
  ranks_[position].received_bytes += others * operation.src.count * item_bytes(position, operation.src);
}

void Machine::deliver(int64_t position, const ReduceScatter& operation, const GivenByMember& given) {
  const Group& group = programs_[position].groups[operation.group];
  const int64_t count = operation.dst.count;
  write(position, operation.dst, reduced(group, operation.op, given, group.index * count, count));
  const auto others = static_cast<int64_t>(group.positions.size()) - 1;
  ranks_[position].received_bytes += others * count * item_bytes(position, operation.src);
}

void Machine::deliver(int64_t position, const AllReduce& operation, const GivenByMember& given) {
  const Group& group = programs_[position].groups[operation.group];
  const auto k = static_cast<int64_t>(group.positions.size());
  const int64_t count = operation.data.count;
  write(position, operation.data, reduced(group, operation.op, given, 0, count));
  ranks_[position].received_bytes += (2 * count * item_bytes(position, operation.data) * (k - 1) + k - 1) / k;
}

void Machine::deliver(int64_t position, const AllToAll& operation, const GivenByMember& given) {
  const Group& group = programs_[position].groups[operation.group];
  Payload all;
  for (int64_t m = 0; m < static_cast<int64_t>(group.positions.size()); ++m) {
    const Given& part = given.at(group.positions[m]);
    const int64_t count = operation.receive_counts[m];
    int64_t offset = 0;
    for (int64_t j = 0; j < group.index; ++j) offset += part.send_counts.at(j);
    check_invariant(part.send_counts.at(group.index) == count, "all_to_all counts disagree");
    all.insert(all.end(), part.values.begin() + offset, part.values.begin() + offset + count);
    if (m != group.index) ranks_[position].received_bytes += count * item_bytes(position, operation.src);
  }
  write(position, operation.dst, all);
}

Machine::Payload Machine::reduced(const Group& group, ReduceOp op, const GivenByMember& given, int64_t offset,
                                  int64_t count) {
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
}

void Machine::execute(int64_t position, const Copy& copy) {
  Rank& rank = ranks_[position];
  check_invariant(rank.alive[copy.src] && rank.alive[copy.dst], "copy touches memory that is not there");
  copy_boxes(copy.boxes, rank.buffers[copy.src].data(), rank.buffers[copy.dst].data(), sizeof(double));
  for (const Box& box : copy.boxes) divide_box(box, rank.buffers[copy.dst], copy.divisor);
}

void Machine::execute(int64_t position, const FillZero& fill) {
  write(position, fill.dst, Payload(fill.dst.count, 0.0));
}

void Machine::execute(int64_t position, const Divide& divide) {
  Payload values = read(position, divide.dst);
  for (double& value : values) value /= divide.divisor;
  write(position, divide.dst, values);
}

void Machine::execute(int64_t position, const Power& power) {
  Payload values = read(position, power.src);
  for (double& value : values) value = std::pow(value, power.exponent);
  write(position, power.dst, values);
}

void Machine::execute(int64_t position, const Cast& cast) { write(position, cast.dst, read(position, cast.src)); }

void Machine::execute(int64_t position, const Reduce& reduce) {
  Payload result = read(position, reduce.parts[0]);
  for (size_t m = 1; m < reduce.parts.size(); ++m) {
    const Payload part = read(position, reduce.parts[m]);
    check_invariant(part.size() == result.size(), "reduce has parts of different sizes");
    for (size_t i = 0; i < part.size(); ++i) result[i] = combine(reduce.op, result[i], part[i]);
  }
  for (double& value : result) value /= reduce.divisor;
  write(position, reduce.dst, result);
}

void Machine::execute(int64_t position, const Gemm& gemm) {
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

int64_t Machine::item_bytes(int64_t position, const BufferRange& range) const {
  return programs_[position].dtype_of(range.buffer).size_bytes();
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
