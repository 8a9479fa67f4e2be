#include "program/program.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {

bool Program::is_output(int buffer) const {
  return std::any_of(outputs.begin(), outputs.end(), [&](const Output& output) { return output.buffer == buffer; });
}

const DType& Program::dtype_of(int buffer) const {
  const auto other = other_dtypes.find(buffer);
  return other != other_dtypes.end() ? other->second : dtype;
}

const Operation& Program::operation_in_effect(const Operation& operation) const {
  const auto* wait = std::get_if<Wait>(&operation);
  return wait != nullptr ? instructions[wait->ticket].operation : operation;
}

Program::Lifetimes Program::lifetimes() const {
  const auto n = static_cast<int>(instructions.size());
  std::vector<int> first(buffer_counts.size(), -1);
  std::vector<int> last(buffer_counts.size(), -1);
  for (int i = 0; i < n; ++i) {
    for (const int b : buffers_of(operation_in_effect(instructions[i].operation))) {
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
