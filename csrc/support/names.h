// Finds enumerators by name.
#pragma once

#include <string>
#include <vector>

#include "support/error.h"

namespace shardwright {

// Enumerators must be 0 to `last` without gaps. Returns the enumerator e with name_of(e) == name. If there is none,
// throws UserError that names `argument` and lists the allowed names.
template <typename Enum>
Enum parse_name(const std::string& argument, const std::string& name, Enum last, const char* (*name_of)(Enum)) {
  std::vector<std::string> known;
  for (int i = 0; i <= static_cast<int>(last); ++i) {
    known.push_back(name_of(static_cast<Enum>(i)));
    if (name == known.back()) return static_cast<Enum>(i);
  }
  throw UserError(concat(argument, " must be one of ", join(known), ", got '", name, "'"));
}

}  // namespace shardwright
