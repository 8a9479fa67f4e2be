// The two exceptions that the torch-free code throws.
//
// UserError       An argument is invalid. The message names the argument, the allowed values, the given value and, if
//                 there is one, the remedy. It becomes ValueError in Python.
// InvariantError  A bug in the library: one of its invariants does not hold. It becomes RuntimeError.
//
// Messages about arguments have one form, which check_argument writes: "dim must be in [-4, 3], got 4".
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace shardwright {

class UserError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Appends a value as text: the result of its to_string() if it has that method, else the output of operator<<. Text and
// integers do not use operator<<, because creating a stream is slow.
template <typename Value>
void append_text(std::string& text, const Value& value) {
  if constexpr (std::convertible_to<const Value&, std::string_view>) {
    text += std::string_view(value);
  } else if constexpr (std::integral<Value> && sizeof(Value) > 1) {
    char digits[24];
    const auto end = std::to_chars(std::begin(digits), std::end(digits), value).ptr;
    text.append(digits, end);
  } else if constexpr (requires { value.to_string(); }) {
    text += value.to_string();
  } else {
    std::ostringstream out;
    out << value;
    text += out.str();
  }
}

// Returns the concatenated texts of its arguments. The checks below call it only on failure, so pass them objects
// rather than the results of to_string().
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append_text(text, parts), ...);
  return text;
}

// Returns the texts of a range of values that append_text accepts, with a separator between them: "a, b, c". Returns ""
// for an empty range.
template <typename Range>
std::string join(const Range& range, std::string_view separator = ", ") {
  std::string text;
  bool first = true;
  for (const auto& item : range) {
    if (!first) text += separator;
    append_text(text, item);
    first = false;
  }
  return text;
}

// Throws UserError with the concatenated parts unless `ok`.
template <typename... Parts>
void check_user(bool ok, const Parts&... parts) {
  if (!ok) throw UserError(concat(parts...));
}

// Throws UserError "<argument> must be <allowed>, got <value>" unless `ok`. `allowed` is one value that append_text
// accepts, such as a text or an InRange; the parts of `value` are concatenated.
template <typename Allowed, typename... Parts>
void check_argument(bool ok, std::string_view argument, const Allowed& allowed, const Parts&... value) {
  if (!ok) throw UserError(concat(argument, " must be ", allowed, ", got ", value...));
}

// A closed interval of allowed integers. Its text is "in [0, 3]".
struct InRange {
  int64_t low, high;

  std::string to_string() const { return concat("in [", low, ", ", high, "]"); }
};

// The allowed indices of a list of `count` items. Its text is "in [0, 3]", or with 0 items "left out, because there are
// no weights".
struct IndexInRange {
  int64_t count;
  const char* items;

  std::string to_string() const {
    return count > 0 ? InRange{0, count - 1}.to_string() : concat("left out, because there are no ", items);
  }
};

// Throws InvariantError with the concatenated parts unless `ok`.
template <typename... Parts>
void check_invariant(bool ok, const Parts&... parts) {
  if (!ok) throw InvariantError(concat("shardwright broke an invariant: ", parts...));
}

}  // namespace shardwright
