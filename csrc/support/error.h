// The two exceptions that the torch-free code throws.
//
// UserError       The caller passed something that is not allowed. The text names the argument, its value, what is
//                 allowed and, where there is one, the remedy. It becomes ValueError in Python.
// InvariantError  The library violated one of its own invariants; the text says which. It becomes RuntimeError.
#pragma once

#include <charconv>
#include <concepts>
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

// Appends a value: what to_string() returns where there is one, else what operator<< writes. Streams are slow to make,
// so only values that are neither text nor integers go through one.
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

// Concatenates its arguments. Pass objects instead of their to_string() to checks, which then make no text unless they
// fail.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::string text;
  (append_text(text, parts), ...);
  return text;
}

// Makes "a, b, c" from any range of such values.
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

template <typename... Parts>
void check_user(bool ok, const Parts&... parts) {
  if (!ok) throw UserError(concat(parts...));
}

template <typename... Parts>
void check_invariant(bool ok, const Parts&... parts) {
  if (!ok) throw InvariantError(concat("shardwright broke an invariant: ", parts...));
}

}  // namespace shardwright
