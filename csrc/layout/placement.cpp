#include "layout/placement.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <charconv>
#include <cmath>
#include <optional>

#include "support/error.h"

namespace shardwright {
namespace {

// Indexed by ReduceOp.
constexpr std::array<const char*, 9> kOpNames{"sum", "avg", "min", "max", "product", "band", "bor", "bxor", "norm"};
constexpr const char* kAllowedForms =
    "one of R, S(dim), SS(dim,split_factor), P, P(op) (op: sum, avg, min, max, product, band, bor, bxor or 'norm p'), "
    "Ragged(dim,size:size:...), Blocks(dim,block), Cyclic(dim,block), Owned(coordinate), Owned(dim,coordinate), "
    "Packed(dim,size:size:...[,unit]), Pieces(dim,begin-end+begin-end:...), or a placement as torch prints it, such as "
    "Shard(dim=0)";

// The names that torch prints for placements (by str and by repr), and our names.
constexpr std::array<std::array<const char*, 2>, 9> kTorchHeads{{
    {"Replicate", "R"},
    {"Shard", "S"},
    {"_S", "SS"},
    {"_StridedShard", "SS"},
    {"StridedShard", "SS"},
    {"Partial", "P"},
    {"_NormP", "P norm"},
    {"_NormPartial", "P norm"},
    {"NormPartial", "P norm"},
}};

std::string without_spaces_at_ends(const std::string& text) {
  size_t begin = 0;
  size_t end = text.size();
  while (begin < end && std::isspace(static_cast<unsigned char>(text[begin]))) ++begin;
  while (end > begin && std::isspace(static_cast<unsigned char>(text[end - 1]))) --end;
  return text.substr(begin, end - begin);
}

// Throws UserError that names a placement's text and the allowed forms.
[[noreturn]] void refuse(const std::string& text) {
  throw UserError(concat("placements must be ", kAllowedForms, ", got '", text, "'"));
}

// The parsers below throw UserError on any other text. `placement` is the text of the placement, for errors.

// Parses an integer of 64 bits, with or without spaces at its ends.
int64_t parse_integer(const std::string& digits, const std::string& placement) {
  const std::string trimmed = without_spaces_at_ends(digits);
  int64_t value = 0;
  const char* end = trimmed.data() + trimmed.size();
  const auto result = std::from_chars(trimmed.data(), end, value);
  if (trimmed.empty() || result.ec != std::errc() || result.ptr != end) refuse(placement);
  return value;
}

// Parses the power of P(norm p): any finite number but 0.
double parse_power(const std::string& digits, const std::string& placement) {
  const std::string trimmed = without_spaces_at_ends(digits);
  double value = 0;
  const char* end = trimmed.data() + trimmed.size();
  const auto result = std::from_chars(trimmed.data(), end, value);
  if (trimmed.empty() || result.ec != std::errc() || result.ptr != end) refuse(placement);
  check_user(std::isfinite(value) && value != 0, "placements: norm power of '", placement,
             "' must be a finite number other than 0, got ", value);
  return value;
}

// Parses the argument of P(...): "sum", "norm 2".
Placement parse_partial(const std::string& argument, const std::string& placement) {
  for (size_t i = 0; i < kOpNames.size(); ++i) {
    const std::string name = kOpNames[i];
    const auto op = static_cast<ReduceOp>(i);
    if (op == ReduceOp::kNorm) {
      if (argument.rfind(name, 0) == 0) {
        return Placement::partial(op, parse_power(argument.substr(name.size()), placement));
      }
    } else if (argument == name) {
      return Placement::partial(op);
    }
  }
  refuse(placement);
}

// Returns the value of a keyword or positional argument: "0" for both "dim=0" and "0".
std::string without_keyword(const std::string& argument, const std::string& keyword) {
  const size_t equals = argument.find('=');
  const bool is_named = equals != std::string::npos && without_spaces_at_ends(argument.substr(0, equals)) == keyword;
  return is_named ? argument.substr(equals + 1) : argument;
}

// Parses "3:1:4".
std::vector<int64_t> parse_sizes(const std::string& sizes, const std::string& placement) {
  std::vector<int64_t> parsed;
  for (size_t begin = 0; begin <= sizes.size();) {
    const size_t end = std::min(sizes.find(':', begin), sizes.size());
    parsed.push_back(parse_integer(sizes.substr(begin, end - begin), placement));
    begin = end + 1;
  }
  return parsed;
}

// Parses "8:4:4", or "8:4:4,2" with units of 2.
CutRule parse_packed(const std::string& numbers, const std::string& placement) {
  const size_t comma = numbers.find(',');
  const int64_t unit = comma == std::string::npos ? 1 : parse_integer(numbers.substr(comma + 1), placement);
  return CutRule::packed(parse_sizes(numbers.substr(0, comma), placement), unit);
}

// Parses "0-2+6-8:2-6": coordinate 0 has [0, 2) and then [6, 8), coordinate 1 has [2, 6). The text of a coordinate
// without elements is empty.
CutRule parse_pieces(const std::string& text, const std::string& placement) {
  std::vector<std::vector<Interval>> lists(1);
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find_first_of(":+", begin), text.size());
    const std::string interval = without_spaces_at_ends(text.substr(begin, end - begin));
    const size_t dash = interval.find('-');
    if (!interval.empty() && dash == std::string::npos) refuse(placement);
    if (!interval.empty()) {
      lists.back().push_back(
          {parse_integer(interval.substr(0, dash), placement), parse_integer(interval.substr(dash + 1), placement)});
    }
    if (end < text.size() && text[end] == ':') lists.emplace_back();
    begin = end + 1;
  }
  return CutRule::pieces(lists);
}

// Returns the rule named `head` with the arguments `numbers`, which follow the tensor dim; nullopt on other names.
std::optional<CutRule> parse_rule(const std::string& head, const std::string& numbers, const std::string& placement) {
  if (head == "SS") return CutRule(parse_integer(without_keyword(numbers, "split_factor"), placement));
  if (head == "Ragged") return CutRule::ragged(parse_sizes(numbers, placement));
  if (head == "Packed") return parse_packed(numbers, placement);
  if (head == "Pieces") return parse_pieces(numbers, placement);
  if (head == "Blocks") return CutRule::blocks(parse_integer(numbers, placement));
  if (head == "Cyclic") return CutRule::cyclic(parse_integer(numbers, placement));
  if (head == "Owned") return CutRule::owned(parse_integer(numbers, placement));
  return std::nullopt;
}

// Returns the shortest text that parses to the same number.
std::string shortest(double value) {
  std::array<char, 32> digits;
  const auto result = std::to_chars(digits.data(), digits.data() + digits.size(), value);
  return std::string(digits.data(), result.ptr);
}

}  // namespace

const char* reduce_op_name(ReduceOp op) { return kOpNames[static_cast<size_t>(op)]; }

Placement Placement::parse(const std::string& text) {
  const std::string trimmed = without_spaces_at_ends(text);
  const size_t open = trimmed.find('(');
  std::string head = without_spaces_at_ends(trimmed.substr(0, open));
  for (const auto& [torch_head, short_head] : kTorchHeads) {
    if (head == torch_head) head = short_head;
  }
  std::string argument;
  if (open != std::string::npos) {
    if (trimmed.back() != ')') refuse(text);
    argument = without_spaces_at_ends(trimmed.substr(open + 1, trimmed.size() - open - 2));
  }
  if (argument.empty()) {  // R, Replicate(), P, Partial()
    if (head == "R") return replicate();
    if (head == "P") return partial(ReduceOp::kSum);
    refuse(text);
  }
  if (head == "S") return shard(parse_integer(without_keyword(argument, "dim"), trimmed));
  if (head == "P") return parse_partial(without_keyword(argument, "reduce_op"), trimmed);
  if (head == "P norm") return parse_partial(concat("norm ", argument), trimmed);
  const size_t comma = argument.find(',');
  if (comma == std::string::npos && head == "Owned") return cut(0, CutRule::owned(parse_integer(argument, trimmed)));
  if (comma == std::string::npos) refuse(text);
  const std::optional<CutRule> rule = parse_rule(head, without_keyword(argument.substr(comma + 1), "sf"), trimmed);
  if (!rule) refuse(text);
  const int64_t dim = parse_integer(without_keyword(argument.substr(0, comma), "dim"), trimmed);
  return head == "SS" ? strided_shard(dim, rule->split_factor()) : cut(dim, *rule);
}

std::string Placement::to_string() const {
  switch (kind) {
    case PlacementKind::kReplicate:
      return "R";
    case PlacementKind::kShard:
    case PlacementKind::kShardByRule:
      return rule.text(dim);
    case PlacementKind::kStridedShard:
      return concat("SS(", dim, ",", rule.split_factor(), ")");
    case PlacementKind::kPartial:
      return op == ReduceOp::kNorm ? concat("P(norm ", shortest(norm_power), ")")
                                   : concat("P(", reduce_op_name(op), ")");
  }
  return "?";
}

std::vector<Placement> parse_placements(const std::string& text) {
  std::vector<Placement> placements;
  int depth = 0;
  std::string part;
  for (const char c : text) {
    depth += c == '(' ? 1 : c == ')' ? -1 : 0;
    if (c == ',' && depth == 0) {
      placements.push_back(Placement::parse(part));
      part.clear();
    } else {
      part.push_back(c);
    }
  }
  placements.push_back(Placement::parse(part));
  return placements;
}

std::string why_not_reducible(ReduceOp op, const DType& dtype) {
  const DTypeKind kind = dtype.kind();
  const auto must_be = [&](const char* allowed, const char* remedy = "") {
    return concat("dtype must be ", allowed, " for a reduction with '", reduce_op_name(op), "', got ", dtype.name(),
                  remedy);
  };
  if (kind == DTypeKind::kOpaque) return must_be("a type with arithmetic", "; cast to float32 or bfloat16 first");
  switch (op) {
    case ReduceOp::kBitAnd:
    case ReduceOp::kBitOr:
    case ReduceOp::kBitXor:
      return kind == DTypeKind::kInteger || kind == DTypeKind::kBool ? "" : must_be("an integer type or bool");
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return kind != DTypeKind::kComplex ? "" : must_be("a type with an order");
    case ReduceOp::kAvg:
      return kind == DTypeKind::kFloat || kind == DTypeKind::kComplex ? "" : must_be("a floating or complex type");
    case ReduceOp::kNorm:
      return kind == DTypeKind::kFloat ? "" : must_be("a floating type");
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return "";
  }
  return "";
}

}  // namespace shardwright
