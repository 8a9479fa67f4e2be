#include "program/program.h"

#include <algorithm>

#include "program/attend_tiles.h"
#include "support/error.h"

namespace shardwright {

size_t Program::num_inputs() const {
  const auto is_not_input = [](const Buffer& buffer) { return buffer.role != BufferRole::kInput; };
  return static_cast<size_t>(std::find_if(buffers.begin(), buffers.end(), is_not_input) - buffers.begin());
}

const Operation& Program::operation_in_effect(const Operation& operation) const {
  const auto* wait = std::get_if<Wait>(&operation);
  return wait != nullptr ? instructions[wait->ticket].operation : operation;
}

Program::Lifetimes Program::lifetimes() const {
  const auto n = static_cast<int>(instructions.size());
  std::vector<int> first(buffers.size(), -1);
  std::vector<int> last(buffers.size(), -1);
  for (int i = 0; i < n; ++i) {
    for (const BufferId b : buffers_of(operation_in_effect(instructions[i].operation))) {
      if (first[b] < 0) first[b] = i;
      last[b] = i;
    }
  }
  Lifetimes lifetimes;
  lifetimes.begins.resize(n);
  lifetimes.ends.resize(n);
  for (size_t i = 0; i < buffers.size(); ++i) {
    const auto b = static_cast<BufferId>(i);
    if (is_of_caller(b) || first[b] < 0) continue;
    lifetimes.begins[first[b]].push_back(b);
    if (!is_output(b)) lifetimes.ends[last[b]].push_back(b);
  }
  return lifetimes;
}

int64_t Program::scratch_bytes(const Operation& operation) const {
  const auto of_product = [&](const auto& o) {
    const int64_t item_bytes = dtype_of(o.q.buffer).size_bytes();
    const bool is_added_in_float32 = o.mask && dtype_of(o.mask->buffer) == DType::kFloat32;
    return shardwright::scratch_bytes(
        o, {item_bytes, is_added_in_float32 ? std::max<int64_t>(item_bytes, 4) : item_bytes});
  };
  if (const auto* o = std::get_if<Attend>(&operation)) return of_product(*o);
  if (const auto* o = std::get_if<AttendBackward>(&operation)) return of_product(*o);
  return 0;
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
    for (const BufferId b : life.begins[i]) live += size_bytes(b);
    int64_t& peak = peaks[instructions[i].step];
    peak = std::max(peak, live + scratch_bytes(instructions[i].operation));
    for (const BufferId b : life.ends[i]) live -= size_bytes(b);
  }
  return peaks;
}

std::string Program::to_string() const {
  std::vector<std::string> lines;
  for (size_t g = 0; g < groups.size(); ++g) {
    lines.push_back(concat("g", g, " = ranks (", join(groups[g].ranks), "), here ", groups[g].index));
  }
  std::vector<std::string> all;
  std::vector<std::string> in;
  std::vector<std::string> out;
  for (size_t b = 0; b < buffers.size(); ++b) all.push_back(concat("b", b, ":", buffers[b].count));
  for (size_t b = 0; b < num_inputs(); ++b) in.push_back(concat("b", b));
  for (const Output& output : outputs) out.push_back(concat("b", output.buffer));
  lines.push_back(concat("buffers ", join(all, " "), ", input ", join(in, " "), ", output ", join(out, " ")));
  if (sms_left > 0) lines.push_back(concat(sms_left, " SMs left to transfers alongside products"));
  for (size_t i = 0; i < instructions.size(); ++i) {
    lines.push_back(concat(i, ". ", shardwright::to_string(instructions[i].operation)));
  }
  return join(lines, "\n");
}

}  // namespace shardwright
