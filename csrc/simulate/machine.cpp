#include "simulate/machine.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "program/copy_boxes.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr double kUnwritten = std::numeric_limits<double>::quiet_NaN();  // value of memory that was not written yet

// Converts one side of a box from elements of the copy's dtype to elements of the buffer's dtype, which may be smaller.
// A copied element is stored at the index of the buffer's element that has its first byte.
void to_buffer_elements(int64_t& offset, std::vector<int64_t>& strides, DType of_copy, DType of_buffer) {
  if (of_copy == of_buffer) return;
  const int64_t factor = of_copy.size_bytes() / of_buffer.size_bytes();
  offset *= factor;
  for (int64_t& stride : strides) stride *= factor;
}

// Returns the index after the last element of one side of a box; 0 for an empty box.
int64_t end_of(const Box& box, int64_t offset, const std::vector<int64_t>& strides) {
  const int64_t extent = extent_of(box.sizes, strides);
  return extent == 0 ? 0 : offset + extent;
}

// Divides the destination elements of a box, which must not be empty, in place.
void divide_box(const Box& box, std::vector<double>& dst, double divisor) {
  if (divisor == 1) return;
  std::vector<int64_t> at(box.sizes.size(), 0);
  while (true) {
    int64_t offset = box.dst_offset;
    for (size_t d = 0; d < at.size(); ++d) offset += at[d] * box.dst_strides[d];
    dst[offset] /= divisor;
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

void Machine::add(Rank rank, Program program, std::vector<Payload> inputs) {
  const size_t expected = program.num_inputs() + program.num_destinations();
  check_invariant(inputs.size() == expected, "rank ", rank, " has ", inputs.size(), " input buffers instead of ",
                  expected);
  const auto [entry, is_new] = processes_.try_emplace(rank);
  check_invariant(is_new, "rank ", rank, " has two programs");
  Process& process = entry->second;
  process.rank = rank;
  process.lifetimes = program.lifetimes();
  process.alive.assign(program.buffers.size(), false);
  std::fill_n(process.alive.begin(), inputs.size(), true);
  process.buffers = std::move(inputs);
  process.buffers.resize(program.buffers.size());
  process.program = std::move(program);
}

void Machine::run() {
  bool progressed = true;
  while (progressed) {
    progressed = false;
    for (auto& [rank, process] : processes_) {
      while (advance(process)) progressed = true;
    }
  }
  for (const auto& [rank, process] : processes_) {
    const size_t at = process.next_instruction;
    check_invariant(at == process.program.instructions.size(), "rank ", rank, " waits forever at instruction ", at,
                    " of\n", process.program);
  }
  check_invariant(messages_in_flight_.empty(), messages_in_flight_.size(), " messages were sent but not received");
}

const Machine::Payload& Machine::output(Rank rank, size_t index) const {
  const Process& process = processes_.at(rank);
  return process.buffers[process.program.outputs[index].buffer];
}

const Machine::Payload& Machine::destination(Rank rank, size_t index) const {
  const Process& process = processes_.at(rank);
  return process.buffers[process.program.num_inputs() + index];
}

bool Machine::advance(Process& process) {
  const Program& program = process.program;
  const size_t at = process.next_instruction;
  if (at == program.instructions.size()) return false;
  for (const BufferId b : process.lifetimes.begins[at]) {
    if (process.alive[b]) continue;  // an instruction that waits is tried several times
    process.alive[b] = true;
    process.buffers[b].assign(program.buffers[b].count, kUnwritten);
    process.live_bytes += program.size_bytes(b);
  }
  const int64_t scratch_bytes = program.scratch_bytes(program.instructions[at].operation);
  process.peak_bytes = std::max(process.peak_bytes, process.live_bytes + scratch_bytes);

  const bool is_done = match(
      program.instructions[at].operation, [&](const Wait& o) { return finish_wait(process, o.ticket); },
      [&](const IsTransfer auto& o) {
        start(process, static_cast<int>(at), o);
        return true;
      },
      [&](const Gemm& o) {
        if (o.flags && !finish_fetch(process, *o.flags)) return false;
        execute(process, o);
        return true;
      },
      [&](const IsCompute auto& o) {
        execute(process, o);
        return true;
      });
  if (!is_done) return false;

  for (const BufferId b : process.lifetimes.ends[at]) {
    process.live_bytes -= program.size_bytes(b);
    process.alive[b] = false;
    Payload().swap(process.buffers[b]);
  }
  ++process.next_instruction;
  return true;
}

void Machine::start(Process& process, int instruction, const SendReceive& operation) {
  const Group& group = process.program.groups[operation.group];
  for (const auto& message : operation.sends) {
    const Route route{group.ranks, process.rank, group.ranks[message.peer]};
    messages_in_flight_[{route, process.sent[route]++}] = read(process, message.range);
  }
  for (const auto& message : operation.receives) {
    const Route route{group.ranks, group.ranks[message.peer], process.rank};
    process.messages_of_ticket[instruction].push_back(process.expected[route]++);
  }
}

void Machine::start(Process& process, int instruction, const AllGather& operation) {
  contribute(process, instruction, operation.group, {read(process, operation.src), {}});
}

void Machine::start(Process& process, int instruction, const ReduceScatter& operation) {
  contribute(process, instruction, operation.group, {read(process, operation.src), {}});
}

void Machine::start(Process& process, int instruction, const AllReduce& operation) {
  contribute(process, instruction, operation.group, {read(process, operation.data), {}});
}

void Machine::start(Process& process, int instruction, const AllToAll& operation) {
  contribute(process, instruction, operation.group, {read(process, operation.src), operation.send_counts});
}

void Machine::start(Process& process, int instruction, const Offer& operation) {
  contribute(process, instruction, operation.group, {read(process, operation.src), {}});
}

void Machine::start(Process& process, int instruction, const Fetch& operation) {
  process.call_of_ticket[instruction] = process.call_of_ticket.at(operation.offer);
  for (const double flag : read(process, operation.flags)) {
    check_invariant(flag == 0, "rank ", process.rank, " starts a fetch while a flag is ", flag, " instead of 0");
  }
}

bool Machine::finish_fetch(Process& process, const Flags& flags) {
  if (!finish_wait(process, flags.fetch)) return false;
  for (const double flag : read(process, flags.range)) {
    check_invariant(flag == 1, "rank ", process.rank, " received a chunk whose flag is ", flag, " instead of 1");
  }
  return true;
}

void Machine::contribute(Process& process, int instruction, int group_index, Contribution contribution) {
  const Group& group = process.program.groups[group_index];
  const int64_t call = process.calls[group.ranks]++;
  process.call_of_ticket[instruction] = call;
  contributions_[{group.ranks, call}][process.rank] = std::move(contribution);
}

bool Machine::finish_wait(Process& process, int ticket) {
  if (process.fetched.contains(ticket)) return true;
  const auto finish_collective = [&](const auto& operation) {
    const Group& group = process.program.groups[operation.group];
    const auto& contributions = contributions_[{group.ranks, process.call_of_ticket[ticket]}];
    if (contributions.size() != group.ranks.size()) return false;
    write_result(process, operation, contributions);
    return true;
  };
  const auto nothing_to_wait_for = [&] {
    check_invariant(false, "rank ", process.rank, " waits for instruction ", ticket, ", which is not a transfer");
    return false;
  };
  return match(
      process.program.instructions[ticket].operation,
      [&](const SendReceive& o) { return receive_messages(process, o, ticket); },
      [&](const Fetch& o) { return finish_collective(o) && process.fetched.insert(ticket).second; },
      [&](const IsTransfer auto& o) { return finish_collective(o); },
      [&](const IsCompute auto&) { return nothing_to_wait_for(); }, [&](const Wait&) { return nothing_to_wait_for(); });
}

bool Machine::receive_messages(Process& process, const SendReceive& operation, int ticket) {
  const Group& group = process.program.groups[operation.group];
  std::vector<std::map<std::pair<Route, int64_t>, Payload>::iterator> arrived;
  for (size_t i = 0; i < operation.receives.size(); ++i) {
    const Route route{group.ranks, group.ranks[operation.receives[i].peer], process.rank};
    arrived.push_back(messages_in_flight_.find({route, process.messages_of_ticket[ticket][i]}));
    if (arrived.back() == messages_in_flight_.end()) return false;
  }
  for (size_t i = 0; i < operation.receives.size(); ++i) {
    const auto& message = operation.receives[i];
    write(process, message.range, arrived[i]->second);
    messages_in_flight_.erase(arrived[i]);
    process.received_bytes += message.range.count * item_bytes(process, message.range);
  }
  return true;
}

void Machine::write_result(Process& process, const AllGather& operation, const ContributionsByMember& contributions) {
  const Group& group = process.program.groups[operation.group];
  Payload all;
  for (const Rank member : group.ranks) {
    const Payload& part = contributions.at(member).values;
    check_invariant(static_cast<int64_t>(part.size()) == operation.src.count,
                    "the parts of an all_gather have different sizes");
    all.insert(all.end(), part.begin(), part.end());
  }
  write(process, operation.dst, all);
  const auto others = static_cast<int64_t>(group.ranks.size()) - 1;
  process.received_bytes += others * operation.src.count * item_bytes(process, operation.src);
}

void Machine::write_result(Process& process, const ReduceScatter& operation,
                           const ContributionsByMember& contributions) {
  const Group& group = process.program.groups[operation.group];
  const int64_t count = operation.dst.count;
  write(process, operation.dst, reduced(group, operation.op, contributions, group.index * count, count));
  const auto others = static_cast<int64_t>(group.ranks.size()) - 1;
  process.received_bytes += others * count * item_bytes(process, operation.src);
}

void Machine::write_result(Process& process, const AllReduce& operation, const ContributionsByMember& contributions) {
  const Group& group = process.program.groups[operation.group];
  const auto k = static_cast<int64_t>(group.ranks.size());
  const int64_t count = operation.data.count;
  write(process, operation.data, reduced(group, operation.op, contributions, 0, count));
  process.received_bytes += (2 * count * item_bytes(process, operation.data) * (k - 1) + k - 1) / k;
}

void Machine::write_result(Process& process, const AllToAll& operation, const ContributionsByMember& contributions) {
  const Group& group = process.program.groups[operation.group];
  Payload all;
  for (int64_t m = 0; m < static_cast<int64_t>(group.ranks.size()); ++m) {
    const Contribution& part = contributions.at(group.ranks[m]);
    const int64_t count = operation.receive_counts[m];
    int64_t offset = 0;
    for (int64_t j = 0; j < group.index; ++j) offset += part.send_counts.at(j);
    check_invariant(part.send_counts.at(group.index) == count, "the send and receive counts of an all_to_all differ");
    all.insert(all.end(), part.values.begin() + offset, part.values.begin() + offset + count);
    if (m != group.index) process.received_bytes += count * item_bytes(process, operation.src);
  }
  write(process, operation.dst, all);
}

void Machine::write_result(Process& process, const Fetch& operation, const ContributionsByMember& contributions) {
  const Group& group = process.program.groups[operation.group];
  const auto k = static_cast<int64_t>(group.ranks.size());
  const int64_t part = operation.dst.count / k;
  for (int64_t m = 0; m < k; ++m) {
    if (m == group.index) continue;
    write(process, {operation.dst.buffer, operation.dst.offset + m * part, part},
          contributions.at(group.ranks[m]).values);
    process.received_bytes += part * item_bytes(process, operation.dst);
  }
  write(process, operation.flags, Payload(operation.flags.count, 1.0));
}

Machine::Payload Machine::reduced(const Group& group, ReduceOp op, const ContributionsByMember& contributions,
                                  int64_t offset, int64_t count) {
  Payload result;
  for (const Rank member : group.ranks) {
    const double* part = contributions.at(member).values.data() + offset;
    if (result.empty()) {
      result.assign(part, part + count);
    } else {
      for (int64_t i = 0; i < count; ++i) result[i] = combine(op, result[i], part[i]);
    }
  }
  return result;
}

void Machine::execute(Process& process, const Copy& copy) {
  check_invariant(process.alive[copy.src] && process.alive[copy.dst], "a copy uses a buffer outside of its life");
  check_invariant(!process.program.is_input(copy.dst), "an instruction writes an input");
  const Program& program = process.program;
  std::vector<Box> boxes = copy.boxes;
  for (Box& box : boxes) {
    to_buffer_elements(box.src_offset, box.src_strides, program.src_dtype(copy), program.dtype_of(copy.src));
    to_buffer_elements(box.dst_offset, box.dst_strides, program.dst_dtype(copy), program.dtype_of(copy.dst));
    check_invariant(end_of(box, box.src_offset, box.src_strides) <= std::ssize(process.buffers[copy.src]) &&
                        end_of(box, box.dst_offset, box.dst_strides) <= std::ssize(process.buffers[copy.dst]),
                    "a copy accesses memory outside of its buffers: ", to_string(Operation(copy)));
  }
  copy_boxes(boxes, process.buffers[copy.src].data(), process.buffers[copy.dst].data(), sizeof(double));
  for (const Box& box : boxes) divide_box(box, process.buffers[copy.dst], copy.divisor);
}

void Machine::execute(Process& process, const FillZero& fill) {
  write(process, fill.dst, Payload(fill.dst.count, 0.0));
}

void Machine::execute(Process& process, const Divide& divide) {
  Payload values = read(process, divide.dst);
  for (double& value : values) value /= divide.divisor;
  write(process, divide.dst, values);
}

void Machine::execute(Process& process, const Power& power) {
  Payload values = read(process, power.src);
  for (double& value : values) value = std::pow(value, power.exponent);
  write(process, power.dst, values);
}

void Machine::execute(Process& process, const Cast& cast) { write(process, cast.dst, read(process, cast.src)); }

void Machine::execute(Process& process, const Reduce& reduce) {
  Payload result = read(process, reduce.parts[0]);
  for (size_t m = 1; m < reduce.parts.size(); ++m) {
    const Payload part = read(process, reduce.parts[m]);
    check_invariant(part.size() == result.size(), "the parts of a reduce have different sizes");
    for (size_t i = 0; i < part.size(); ++i) result[i] = combine(reduce.op, result[i], part[i]);
  }
  for (double& value : result) value /= reduce.divisor;
  write(process, reduce.dst, result);
}

void Machine::execute(Process& process, const Gemm& gemm) {
  check_invariant(!process.program.is_input(gemm.dst.buffer), "an instruction writes an input");
  const auto element = [&](const Matrix& matrix, int64_t base, int64_t i, int64_t j) {
    return data(process, {matrix.buffer, matrix.offset + base + i * matrix.row_stride + j * matrix.column_stride, 1});
  };
  const auto factor = [&](const std::optional<Scale>& scale, int64_t i) {
    return scale ? *data(process, {scale->buffer, scale->offset + i * scale->stride, 1}) : 1.0;
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

double* Machine::data(Process& process, const BufferRange& range) {
  check_invariant(process.alive[range.buffer], "buffer ", range.buffer, " is used outside of its life");
  check_invariant(
      range.offset >= 0 && range.offset + range.count <= static_cast<int64_t>(process.buffers[range.buffer].size()),
      "buffer ", range.buffer, " is accessed outside of its bounds");
  return process.buffers[range.buffer].data() + range.offset;
}

int64_t Machine::item_bytes(const Process& process, const BufferRange& range) {
  return process.program.dtype_of(range.buffer).size_bytes();
}

Machine::Payload Machine::read(Process& process, const BufferRange& range) {
  const double* begin = data(process, range);
  return Payload(begin, begin + range.count);
}

void Machine::write(Process& process, const BufferRange& range, const Payload& payload) {
  check_invariant(!process.program.is_input(range.buffer), "an instruction writes an input");
  check_invariant(static_cast<int64_t>(payload.size()) == range.count, "a transfer has ", payload.size(),
                  " elements for a range of ", range.count);
  std::copy(payload.begin(), payload.end(), data(process, range));
}

}  // namespace shardwright
