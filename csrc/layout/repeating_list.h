// A list that stores items once if they repeat at equal distances: a block-cyclic part of a million blocks is one
// stored interval and a count. Iteration visits all items.
//
// An item is a run of consecutive numbers. Repetitions of an item differ by a multiple of a Shift.
//
//   struct Item {
//     using Shift = ...;                             // may be multiplied by an integer, and compared by ==
//     int64_t extent() const;                        // the length of the run
//     bool is_followed_by(const Item& next) const;   // true if `next` continues this item: both can be merged
//     void lengthen(int64_t by);                     // moves the end of the run
//     Item part(int64_t from, int64_t to) const;     // the part of the run at [from, to)
//     Item shifted(const Shift& by) const;
//     bool operator==(const Item&) const;
//   };
//
// Invariants:
//   - No item continues the item before it, across repetitions too. So lists that were built in different ways have the
//     same items. Only the stored repetitions may differ.
//   - Items that repeat fewer than kLeastRepeats times are stored one by one, so most lists store no repetitions. A
//     first or last repetition that was merged with an item outside the repetitions is stored item by item too.
//
// Memory and copies are O(stored items). Iteration is O(all items).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <span>
#include <vector>

#include "support/small_vector.h"

namespace shardwright {

template <typename Item>
class RepeatingList {
 public:
  using Shift = typename Item::Shift;
  static constexpr int64_t kLeastRepeats = 4;

  // Items that repeat `count` times, each time shifted by `shift` more.
  struct Block {
    std::span<const Item> items;
    int64_t count = 1;
    Shift shift{};
  };

  RepeatingList() = default;
  // Appends the items in order. Items without elements are left out.
  RepeatingList(std::initializer_list<Item> items) {
    for (const Item& item : items) {
      if (item.extent() > 0) append(item);
    }
  }

  // Appends an item, whose extent must not be 0. Lengthens the last item instead if `item` continues it.
  void append(const Item& item);
  // Appends a sequence of items `count` times, each time shifted by `shift` more; the first time, it is not shifted.
  // Does nothing if `count` is 0.
  void append_repeated(std::span<const Item> sequence, const Shift& shift, int64_t count);
  void append(const Block& block) { append_repeated(block.items, block.shift, block.count); }
  void clear() { *this = {}; }

  bool empty() const { return stored_.empty(); }
  bool has_repeats() const { return !repeats_.empty(); }
  // Returns the number of items, repetitions included.
  size_t size() const;
  // The list must not be empty.
  Item front() const { return stored_.front(); }
  Item back() const;
  // Returns item i, which must exist. Time: O(blocks with repetitions).
  Item operator[](size_t i) const;

  // Returns the sum of the items' extents.
  int64_t extent() const;
  // Returns the part [begin, end) of the concatenated items, in units of extent(). Clips it to [0, extent()).
  RepeatingList part(int64_t begin, int64_t end) const;

  // Returns the stored items. These are all items if has_repeats() is false.
  std::span<const Item> stored() const { return stored_; }
  // Returns the list as blocks, in order. Items between two blocks with repetitions are one block. Blocks point into
  // the list, so the overload for temporary lists is deleted.
  std::vector<Block> blocks() const&;
  std::vector<Block> blocks() && = delete;
  // Calls visit(block) for each block.
  template <typename Visit>
  void for_each_block(const Visit& visit) const;

  class Iterator;
  Iterator begin() const { return Iterator(*this, 0); }
  Iterator end() const { return Iterator(*this, stored_.size()); }
  using value_type = Item;
  using const_iterator = Iterator;
  using iterator = Iterator;

  // True if the lists are equal and store the same repetitions. Equal lists may store different repetitions.
  bool is_identical(const RepeatingList& other) const { return stored_ == other.stored_ && repeats_ == other.repeats_; }

 private:
  // stored_[first, last) repeats `count` times.
  struct Repeat {
    size_t first = 0;
    size_t last = 0;
    int64_t count = 1;
    Shift shift{};
    bool operator==(const Repeat&) const = default;
  };

  // Returns the sequence, with each item that continues the item before it merged into that item.
  static std::vector<Item> joined(std::span<const Item> sequence);
  bool ends_with_repeat() const { return !repeats_.empty() && repeats_.back().last == stored_.size(); }
  // If the list ends with repetitions, lists the last of them, so that stored_.back() is the last item.
  void unroll_last();

  SmallVector<Item> stored_;     // the stored items: the first repetition of each Repeat, and all other items
  std::vector<Repeat> repeats_;  // by position in stored_, ascending
};

template <typename Item>
class RepeatingList<Item>::Iterator {
 public:
  using iterator_category = std::input_iterator_tag;
  using value_type = Item;
  using difference_type = std::ptrdiff_t;
  using pointer = const Item*;
  using reference = Item;

  Iterator() = default;
  Iterator(const RepeatingList& list, size_t at) : list_(&list), at_(at) {}

  Item operator*() const {
    const Item& item = list_->stored_[at_];
    return times_ == 0 ? item : item.shifted(list_->repeats_[repeat_].shift * times_);
  }
  Iterator& operator++() {
    ++at_;
    if (repeat_ < list_->repeats_.size() && at_ == list_->repeats_[repeat_].last) {
      const Repeat& repeat = list_->repeats_[repeat_];
      if (++times_ < repeat.count) {
        at_ = repeat.first;
      } else {
        times_ = 0;
        ++repeat_;
      }
    }
    return *this;
  }
  Iterator operator++(int) {
    Iterator before = *this;
    ++*this;
    return before;
  }
  bool operator==(const Iterator& other) const { return at_ == other.at_ && times_ == other.times_; }

 private:
  const RepeatingList* list_ = nullptr;
  size_t at_ = 0;      // index into stored_
  size_t repeat_ = 0;  // index of the Repeat that contains at_, or else of the next Repeat
  int64_t times_ = 0;  // index of the repetition
};

template <typename Item>
std::vector<Item> RepeatingList<Item>::joined(std::span<const Item> sequence) {
  std::vector<Item> items;
  items.reserve(sequence.size());
  for (const Item& item : sequence) {
    if (!items.empty() && items.back().is_followed_by(item)) {
      items.back().lengthen(item.extent());
    } else {
      items.push_back(item);
    }
  }
  return items;
}

template <typename Item>
void RepeatingList<Item>::unroll_last() {
  if (!ends_with_repeat()) return;
  Repeat& last = repeats_.back();
  const size_t first = last.first;
  const size_t end = last.last;
  const Shift shift = last.shift * (last.count - 1);
  if (--last.count == 1) repeats_.pop_back();
  for (size_t i = first; i < end; ++i) stored_.push_back(stored_[i].shifted(shift));
}

template <typename Item>
void RepeatingList<Item>::append(const Item& item) {
  if (!empty() && back().is_followed_by(item)) {
    unroll_last();
    stored_.back().lengthen(item.extent());
  } else {
    stored_.push_back(item);
  }
}

template <typename Item>
void RepeatingList<Item>::append_repeated(std::span<const Item> sequence, const Shift& shift, int64_t count) {
  std::vector<Item> items = joined(sequence);
  if (items.empty() || count <= 0) return;
  const auto append_all = [&](int64_t times) {
    for (const Item& item : items) append(item.shifted(shift * times));
  };
  if (items.back().is_followed_by(items.front().shifted(shift))) {
    if (items.size() == 1) {
      items[0].lengthen((count - 1) * items[0].extent());
      return append(items[0]);
    }
    // The first item of each repetition continues the last item of the repetition before it, so both are merged:
    // 0-1 4-6 | 6-7 10-12 | 12-13 16-18 is 0-1, then 4-7 | 10-13, then 16-18.
    append(items.front());
    const int64_t first_extent = items.front().extent();
    items.erase(items.begin());
    if (count > 1) {
      items.back().lengthen(first_extent);
      append_repeated(items, shift, count - 1);
      items.back().lengthen(-first_extent);
    }
    return append_all(count - 1);
  }
  int64_t done = 0;  // number of repetitions that are appended one by one
  if (count < kLeastRepeats) {
    while (done < count) append_all(done++);
    return;
  }
  if (!empty() && back().is_followed_by(items.front())) append_all(done++);
  const size_t first = stored_.size();
  for (const Item& item : items) stored_.push_back(item.shifted(shift * done));
  repeats_.push_back({first, stored_.size(), count - done, shift});
}

template <typename Item>
size_t RepeatingList<Item>::size() const {
  size_t total = stored_.size();
  for (const Repeat& repeat : repeats_) total += (repeat.last - repeat.first) * static_cast<size_t>(repeat.count - 1);
  return total;
}

template <typename Item>
Item RepeatingList<Item>::back() const {
  const Item& last = stored_.back();
  return ends_with_repeat() ? last.shifted(repeats_.back().shift * (repeats_.back().count - 1)) : last;
}

template <typename Item>
Item RepeatingList<Item>::operator[](size_t i) const {
  size_t added = 0;  // items that repetitions before item i add
  for (const Repeat& repeat : repeats_) {
    const size_t first = repeat.first + added;
    const size_t items = repeat.last - repeat.first;
    if (i < first) break;
    if (i - first < items * static_cast<size_t>(repeat.count)) {
      return stored_[repeat.first + (i - first) % items].shifted(repeat.shift *
                                                                 static_cast<int64_t>((i - first) / items));
    }
    added += items * static_cast<size_t>(repeat.count - 1);
  }
  return stored_[i - added];
}

template <typename Item>
int64_t RepeatingList<Item>::extent() const {
  int64_t total = 0;
  for (const Item& item : stored_) total += item.extent();
  for (const Repeat& repeat : repeats_) {
    for (size_t i = repeat.first; i < repeat.last; ++i) total += (repeat.count - 1) * stored_[i].extent();
  }
  return total;
}

// Takes up to three ranges of each block: the end of a repetition, the full repetitions, and the beginning of another
// repetition.
template <typename Item>
RepeatingList<Item> RepeatingList<Item>::part(int64_t begin, int64_t end) const {
  RepeatingList out;
  int64_t before = 0;  // extent of the blocks before this one
  for (const Block& block : blocks()) {
    int64_t once = 0;  // extent of one repetition
    for (const Item& item : block.items) once += item.extent();
    const int64_t from = std::max<int64_t>(begin - before, 0);
    const int64_t to = std::min(end - before, once * block.count);
    before += once * block.count;
    if (from >= to) continue;
    const auto append_part = [&](int64_t repetition, int64_t first, int64_t last) {
      for (const Item& item : block.items) {
        const int64_t extent = item.extent();
        if (first < extent && last > 0) {
          out.append(item.part(std::max<int64_t>(first, 0), std::min(last, extent)).shifted(block.shift * repetition));
        }
        first -= extent;
        last -= extent;
      }
    };
    const int64_t first_whole = (from + once - 1) / once;
    const int64_t end_whole = to / once;
    if (first_whole > end_whole) {
      append_part(end_whole, from - end_whole * once, to - end_whole * once);
      continue;
    }
    if (from < first_whole * once) append_part(first_whole - 1, from - (first_whole - 1) * once, once);
    std::vector<Item> repetition;
    for (const Item& item : block.items) repetition.push_back(item.shifted(block.shift * first_whole));
    out.append_repeated(repetition, block.shift, end_whole - first_whole);
    if (end_whole * once < to) append_part(end_whole, 0, to - end_whole * once);
  }
  return out;
}

template <typename Item>
template <typename Visit>
void RepeatingList<Item>::for_each_block(const Visit& visit) const {
  const auto visit_stored = [&](size_t first, size_t last, int64_t count, const Shift& shift) {
    if (first < last) visit(Block{std::span<const Item>(stored_).subspan(first, last - first), count, shift});
  };
  size_t next = 0;
  for (const Repeat& repeat : repeats_) {
    visit_stored(next, repeat.first, 1, {});
    visit_stored(repeat.first, repeat.last, repeat.count, repeat.shift);
    next = repeat.last;
  }
  visit_stored(next, stored_.size(), 1, {});
}

template <typename Item>
std::vector<typename RepeatingList<Item>::Block> RepeatingList<Item>::blocks() const& {
  std::vector<Block> blocks;
  for_each_block([&](const Block& block) { blocks.push_back(block); });
  return blocks;
}

}  // namespace shardwright
