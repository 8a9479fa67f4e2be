// The two exceptions that the torch-free code throws.
//
// UserError       The caller passed something that is not allowed. The text names the argument, its value, what is
//                 allowed and, where there is one, the remedy. It becomes ValueError in Python.
// InvariantError  The library violated one of its own invariants; the text says which. It becomes RuntimeError.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace shardwright {

class UserError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

class InvariantError : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};

// Concatenates its arguments with operator<<.
template <typename... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

// Makes "a, b, c" from any range of streamable values.
template <typename Range>
std::string join(const Range& range, const char* separator = ", ") {
  std::ostringstream out;
  bool first = true;
  for (const auto& item : range) {
    if (!first) out << separator;
    out << item;
    first = false;
  }
  return out.str();
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
