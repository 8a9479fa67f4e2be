// Numbers layouts. Equal layouts (Layout::operator==: the same elements at the same positions, and one dtype) get one
// number.
#pragma once

#include <unordered_map>

#include "layout/layout.h"

namespace shardwright {

// Stores pointers to the layouts. The layouts must outlive this object and keep their addresses.
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
