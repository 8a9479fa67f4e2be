// The format in which plans, products and their parts are passed between processes and extension modules.
//
//   "shardwright <kind> <version>\n", then the fields, then a checksum of everything before it
//
// The kind (such as "plan", "batch" or "product") determines the fields. Fields have no names. Integers are eight
// bytes, lowest byte first; text is its length and its bytes. Equal values give equal bytes in every process. Graphs
// and operators take strings, so for them the bytes are written as "label|base64" (to_text).
//
// A Reader is safe on damaged and forged bytes. It throws UserError that names the kind if a read would pass the end of
// the bytes, allocate memory for more items than the bytes can contain, or return a value out of range. It does not
// check that the fields agree with each other; its callers do (planning/serialize.h, products/serialize.h).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace shardwright {

// Appends fields to the bytes of one object.
class Writer {
 public:
  explicit Writer(std::string_view kind);

  void integer(int64_t value);
  void real(double value);
  void boolean(bool value) { integer(value ? 1 : 0); }
  void text(std::string_view value);
  template <typename Enum>
  void enumerator(Enum value) {
    integer(static_cast<int64_t>(value));
  }
  // Writes the number of items, then calls write(item) for each.
  template <typename Items, typename Write>
  void list(const Items& items, const Write& write) {
    integer(static_cast<int64_t>(items.size()));
    for (const auto& item : items) write(item);
  }
  void integers(const std::vector<int64_t>& values) {
    list(values, [this](int64_t value) { integer(value); });
  }
  // Writes a boolean (present or not), then calls write(*value) if present.
  template <typename T, typename Write>
  void optional(const std::optional<T>& value, const Write& write) {
    boolean(value.has_value());
    if (value) write(*value);
  }

  // Returns the written bytes with their checksum appended.
  std::string finish() &&;

 private:
  std::string bytes_;
};

// Reads fields in the order in which a Writer wrote them. Does not own the bytes, which must outlive it.
class Reader {
 public:
  // Throws UserError if the bytes are truncated, changed, of another kind or of another version.
  Reader(std::string_view bytes, std::string_view kind);

  int64_t integer();
  // Reads an integer. Throws UserError unless it is in [least, most].
  int64_t integer(int64_t least, int64_t most);
  double real();
  bool boolean() { return integer(0, 1) == 1; }
  std::string text();
  // Reads an enumerator. Throws UserError unless its value is in [0, last].
  template <typename Enum>
  Enum enumerator(Enum last) {
    return static_cast<Enum>(integer(0, static_cast<int64_t>(last)));
  }
  // Reads a list by one call of read() for each item, which must read at least one field. Throws UserError if there are
  // more than `most` items.
  template <typename Read>
  auto list(const Read& read, size_t most = SIZE_MAX) {
    std::vector<decltype(read())> items;
    for (size_t left = list_length(most); left > 0; --left) items.push_back(read());
    return items;
  }
  std::vector<int64_t> integers() {
    return list([this] { return integer(); });
  }
  // Reads a boolean (present or not), then calls read() if present.
  template <typename Read>
  auto optional(const Read& read) {
    return boolean() ? std::optional(read()) : std::nullopt;
  }

  // Throws UserError if unread bytes remain.
  void finish() const;

 private:
  // Removes the next `count` bytes and returns them. Throws UserError if fewer remain.
  std::string_view take(size_t count);
  // Reads the length of a list. Throws UserError if it exceeds `most` or the number of 8-byte fields in the remaining
  // bytes.
  size_t list_length(size_t most);

  std::string kind_;
  std::string_view bytes_;  // the bytes not yet read, without the checksum
};

// Returns the kind in the first line of bytes from a Writer, or "" for other bytes or another version. Checks nothing
// after that line.
std::string_view kind_of(std::string_view bytes);

// Returns "label|base64". The label is for people to read and contains no '|'.
std::string to_text(std::string_view label, std::string_view bytes);
// Returns the bytes of a text from to_text. Throws UserError that names `argument` if the text has another form.
std::string bytes_from_text(std::string_view text, std::string_view argument);

}  // namespace shardwright
