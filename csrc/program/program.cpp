#include "program/program.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

std::string text(const BufferRange& r) { return concat("b", r.buffer, "[", r.offset, ":", r.offset + r.count, "]"); }

std::string text(const std::vector<SendReceive::Message>& messages) {
  std::vector<std::string> parts;
  for (const auto& m : messages) parts.push_back(concat(m.peer, ":", text(m.range)));
  return join(parts, " ");
}

}  // namespace

std::string to_string(const Operation& operation) {
  return std::visit(
      Overloaded{
          [](const Copy& o) {
            return concat("copy b", o.src, " -> b", o.dst, " in ", o.boxes.size(), " boxes",
                          o.divisor != 1 ? concat(", divided by ", o.divisor) : "");
          },
          [](const FillZero& o) { return concat("fill ", text(o.dst), " = 0"); },
          [](const Divide& o) { return concat("divide ", text(o.dst), " by ", o.divisor); },
          [](const Power& o) { return concat("power ", text(o.src), " ** ", o.exponent, " -> ", text(o.dst)); },
          [](const Reduce& o) {
            std::vector<std::string> parts;
            for (const BufferRange& part : o.parts) parts.push_back(text(part));
            const std::string divided = o.divisor != 1 ? concat(", divided by ", o.divisor) : "";
            return concat("reduce ", reduce_op_name(o.op), " of ", join(parts), divided, " -> ", text(o.dst));
          },
          [](const Cast& o) { return concat("cast ", text(o.src), " -> ", text(o.dst)); },
          [](const Gemm& o) {
            const std::string times = o.count > 1 ? concat(o.count, " x ") : "";
            return concat("gemm ", times, o.m, "x", o.k, " b", o.lhs.buffer, "[", o.lhs.offset, "] by ", o.k, "x", o.n,
                          " b", o.rhs.buffer, "[", o.rhs.offset, "]", o.lhs_scale ? " scaled" : "",
                          o.bias ? " plus bias" : "", o.accumulates ? " added to b" : " -> b", o.dst.buffer, "[",
                          o.dst.offset, "]");
          },
          [](const AllGather& o) { return concat("all_gather g", o.group, " ", text(o.src), " -> ", text(o.dst)); },
          [](const ReduceScatter& o) {
            return concat("reduce_scatter ", reduce_op_name(o.op), " g", o.group, " ", text(o.src), " -> ",
                          text(o.dst));
          },
          [](const AllReduce& o) {
            return concat("all_reduce ", reduce_op_name(o.op), " g", o.group, " ", text(o.data));
          },
          [](const AllToAll& o) {
            return concat("all_to_all ", o.by_messages ? "by messages " : "", "g", o.group, " ", text(o.src), " (",
                          join(o.send_counts), ") -> ", text(o.dst), " (", join(o.receive_counts), ")");
          },
          [](const SendReceive& o) {
            return concat("send_receive g", o.group, " to {", text(o.sends), "} from {", text(o.receives), "}");
          },
          [](const Wait& o) { return concat("wait for instruction ", o.ticket); },
      },
      operation);
}

int group_of(const Operation& operation) {
  if (const auto* o = std::get_if<AllGather>(&operation)) return o->group;
  if (const auto* o = std::get_if<ReduceScatter>(&operation)) return o->group;
  if (const auto* o = std::get_if<AllReduce>(&operation)) return o->group;
  if (const auto* o = std::get_if<AllToAll>(&operation)) return o->group;
  if (const auto* o = std::get_if<SendReceive>(&operation)) return o->group;
  return -1;
}

bool is_communication(const Operation& operation) { return group_of(operation) >= 0; }

std::vector<int> buffers_of(const Operation& operation) {
  return std::visit(Overloaded{
                        [](const Copy& o) { return std::vector<int>{o.src, o.dst}; },
                        [](const FillZero& o) { return std::vector<int>{o.dst.buffer}; },
                        [](const Divide& o) { return std::vector<int>{o.dst.buffer}; },
                        [](const Power& o) { return std::vector<int>{o.src.buffer, o.dst.buffer}; },
                        [](const Reduce& o) {
                          std::vector<int> buffers{o.dst.buffer};
                          for (const BufferRange& part : o.parts) buffers.push_back(part.buffer);
                          return buffers;
                        },
                        [](const Cast& o) { return std::vector<int>{o.src.buffer, o.dst.buffer}; },
                        [](const Gemm& o) {
                          std::vector<int> buffers{o.lhs.buffer, o.rhs.buffer, o.dst.buffer};
                          if (o.bias) buffers.push_back(o.bias->buffer);
                          for (const auto* scale : {&o.lhs_scale, &o.rhs_scale}) {
                            if (*scale) buffers.push_back((*scale)->buffer);
                          }
                          return buffers;
                        },
                        [](const AllGather& o) { return std::vector<int>{o.src.buffer, o.dst.buffer}; },
                        [](const ReduceScatter& o) { return std::vector<int>{o.src.buffer, o.dst.buffer}; },
                        [](const AllReduce& o) { return std::vector<int>{o.data.buffer}; },
                        [](const AllToAll& o) { return std::vector<int>{o.src.buffer, o.dst.buffer}; },
                        [](const SendReceive& o) {
                          std::vector<int> buffers;
                          for (const auto& m : o.sends) buffers.push_back(m.range.buffer);
                          for (const auto& m : o.receives) buffers.push_back(m.range.buffer);
                          return buffers;
                        },
                        [](const Wait&) { return std::vector<int>{}; },
                    },
                    operation);
}

bool Program::is_output(int buffer) const {
  return std::any_of(outputs.begin(), outputs.end(), [&](const Output& output) { return output.buffer == buffer; });
}

const DType& Program::dtype_of(int buffer) const {
  const auto other = other_dtypes.find(buffer);
  return other != other_dtypes.end() ? other->second : dtype;
}

Program::Lifetimes Program::lifetimes() const {
  const auto n = static_cast<int>(instructions.size());
  std::vector<int> first(buffer_counts.size(), -1);
  std::vector<int> last(buffer_counts.size(), -1);
  for (int i = 0; i < n; ++i) {
    const Wait* wait = std::get_if<Wait>(&instructions[i].operation);
    const Operation& touched = wait != nullptr ? instructions[wait->ticket].operation : instructions[i].operation;
    for (const int b : buffers_of(touched)) {
      if (first[b] < 0) first[b] = i;
      last[b] = i;
    }
  }
  Lifetimes lifetimes;
  lifetimes.begins.resize(n);
  lifetimes.ends.resize(n);
  for (int b = 0; b < static_cast<int>(buffer_counts.size()); ++b) {
    if (is_input(b) || first[b] < 0) continue;
    lifetimes.begins[first[b]].push_back(b);
    if (!is_output(b)) lifetimes.ends[last[b]].push_back(b);
  }
  return lifetimes;
}

int64_t Program::peak_bytes() const {
  const std::vector<int64_t> peaks = peak_bytes_by_step();
  return peaks.empty() ? 0 : *std::max_element(peaks.begin(), peaks.end());
}

std::vector<int64_t> Program::peak_bytes_by_step() const {
  const Lifetimes life = lifetimes();
  std::vector<int64_t> peaks(step_texts.size(), 0);
  int64_t live = 0;
  for (size_t i = 0; i < instructions.size(); ++i) {
    for (const int b : life.begins[i]) live += size_bytes(b);
    int64_t& peak = peaks[instructions[i].step];
    peak = std::max(peak, live);
    for (const int b : life.ends[i]) live -= size_bytes(b);
  }
  return peaks;
}

std::string Program::to_string() const {
  std::vector<std::string> lines;
  for (size_t g = 0; g < groups.size(); ++g) {
    lines.push_back(concat("g", g, " = ranks (", join(groups[g].ranks), "), here ", groups[g].index));
  }
  std::vector<std::string> buffers;
  for (size_t b = 0; b < buffer_counts.size(); ++b) buffers.push_back(concat("b", b, ":", buffer_counts[b]));
  std::vector<std::string> in;
  std::vector<std::string> out;
  for (size_t b = 0; b < input_shapes.size(); ++b) in.push_back(concat("b", b));
  for (const Output& output : outputs) out.push_back(concat("b", output.buffer));
  lines.push_back(concat("buffers ", join(buffers, " "), ", input ", join(in, " "), ", output ", join(out, " ")));
  if (sms_left > 0) lines.push_back(concat(sms_left, " SMs left to transfers under way beside products"));
  for (size_t i = 0; i < instructions.size(); ++i) {
    lines.push_back(concat(i, ". ", shardwright::to_string(instructions[i].operation)));
  }
  return join(lines, "\n");
}

}  // namespace shardwright
