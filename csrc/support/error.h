// The two kinds of failure of the torch-free half.
//
// UserError       the caller gave something that is not allowed; the text names the argument, its value,
//                 what is allowed and, where there is one, the remedy. Becomes ValueError in Python.
// InvariantError  this library broke a promise to itself; the text says which. Becomes RuntimeError.
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

// "a, b, c" from any range of streamable things.
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
