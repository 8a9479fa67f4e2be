// Numbers for layouts that place the same elements at the same positions, and have one dtype.
#pragma once

#include <unordered_map>

#include "layout/layout.h"

namespace shardwright {

// The layouts must stay where they are.
class LayoutNumbers {
 public:
  int of(const Layout& layout) {
    return numbers_.try_emplace(&layout, static_cast<int>(numbers_.size())).first->second;
  }

 private:
  struct Hash {
    size_t operator()(const Layout* layout) const { return layout->hash(); }
  };
  struct Equal {
    bool operator()(const Layout* a, const Layout* b) const { return *a == *b; }
  };
  std::unordered_map<const Layout*, int, Hash, Equal> numbers_;
};

}  // namespace shardwright
