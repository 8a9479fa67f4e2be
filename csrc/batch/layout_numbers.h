// Numbers layouts. Layouts that place the same elements at the same positions and have one dtype get one number.
#pragma once

#include <unordered_map>

#include "layout/layout.h"

namespace shardwright {

// Stores pointers to the layouts, which must outlive it and not move.
class LayoutNumbers {
 public:
  // Returns the number of a layout. The first distinct layout has number 0, the next one 1, and so on.
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
