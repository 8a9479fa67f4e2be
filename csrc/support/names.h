// Enums by the names that people write.
#pragma once

#include <string>
#include <vector>

#include "support/error.h"

namespace shardwright {

// The value whose name it is, of those from 0 to `last`. Throws UserError naming the argument and the names.
template <typename Enum>
Enum parse_name(const std::string& argument, const std::string& name, Enum last, const char* (*name_of)(Enum)) {
  std::vector<std::string> known;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    known.push_back(name_of(static_cast<Enum>(i)));
    if (name == known.back()) return static_cast<Enum>(i);
  }
  throw UserError(concat(argument, ": '", name, "' is not known; allowed are ", join(known)));
}

}  // namespace shardwright
