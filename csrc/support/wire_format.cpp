#include "support/wire_format.h"

#include <algorithm>
#include <cstring>

#include "support/base64.h"
#include "support/error.h"

namespace shardwright {
namespace {

constexpr std::string_view kMagic = "shardwright ";
constexpr std::string_view kVersion = " 6\n";
constexpr size_t kFieldBytes = 8;

// Returns the FNV-1a hash.
uint64_t checksum(std::string_view bytes) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

// Returns the integer in a field of 8 bytes, lowest byte first.
int64_t decode_integer(std::string_view field) {
  uint64_t value = 0;
  for (size_t i = kFieldBytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(field[i]);
  return static_cast<int64_t>(value);
}

}  // namespace

Writer::Writer(std::string_view kind) : bytes_(concat(kMagic, kind, kVersion)) {}

void Writer::integer(int64_t value) {
  for (int shift = 0; shift < 64; shift += 8)
    bytes_.push_back(static_cast<char>(static_cast<uint64_t>(value) >> shift));
}

void Writer::real(double value) {
  int64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  integer(bits);
}

void Writer::text(std::string_view value) {
  integer(static_cast<int64_t>(value.size()));
  bytes_ += value;
}

std::string Writer::finish() && {
  integer(static_cast<int64_t>(checksum(bytes_)));
  return std::move(bytes_);
}

Reader::Reader(std::string_view bytes, std::string_view kind) : kind_(kind) {
  const std::string start = concat(kMagic, kind, kVersion);
  check_user(bytes.size() >= start.size() + kFieldBytes && bytes.starts_with(start), kind, " bytes must begin with '",
             std::string_view(start).substr(0, start.size() - 1), "', got other, older or truncated bytes");
  const std::string_view body = bytes.substr(0, bytes.size() - kFieldBytes);
  check_user(static_cast<uint64_t>(decode_integer(bytes.substr(body.size()))) == checksum(body), kind,
             " bytes must match their checksum, got damaged bytes");
  bytes_ = body.substr(start.size());
}

std::string_view Reader::take(size_t count) {
  check_user(count <= bytes_.size(), kind_, " bytes must be complete, got a field of ", count, " bytes with only ",
             bytes_.size(), " left");
  const std::string_view out = bytes_.substr(0, count);
  bytes_.remove_prefix(count);
  return out;
}

int64_t Reader::integer() { return decode_integer(take(kFieldBytes)); }

int64_t Reader::integer(int64_t least, int64_t most) {
  const int64_t value = integer();
  check_user(value >= least && value <= most, kind_, " bytes: an integer must be ", InRange{least, most}, ", got ",
             value);
  return value;
}

double Reader::real() {
  const int64_t bits = integer();
  double value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

std::string Reader::text() {
  const int64_t length = integer();
  check_user(length >= 0 && static_cast<uint64_t>(length) <= bytes_.size(), kind_,
             " bytes: the length of a text must be in [0, ", bytes_.size(), "], got ", length);
  return std::string(take(static_cast<size_t>(length)));
}

size_t Reader::list_length(size_t most) {
  const int64_t n = integer();
  const size_t limit = std::min(bytes_.size() / kFieldBytes, most);
  check_user(n >= 0 && static_cast<uint64_t>(n) <= limit, kind_, " bytes: the length of a list must be in [0, ", limit,
             "], got ", n);
  return static_cast<size_t>(n);
}

void Reader::finish() const {
  check_user(bytes_.empty(), kind_, " bytes must end after the last field, got ", bytes_.size(), " bytes more");
}

std::string_view kind_of(std::string_view bytes) {
  const size_t end = bytes.find(kVersion);
  if (!bytes.starts_with(kMagic) || end == std::string_view::npos || end < kMagic.size()) return {};
  return bytes.substr(kMagic.size(), end - kMagic.size());
}

std::string to_text(std::string_view label, std::string_view bytes) { return concat(label, "|", to_base64(bytes)); }

std::string bytes_from_text(std::string_view text, std::string_view argument) {
  const size_t bar = text.rfind('|');
  const std::optional<std::string> bytes =
      bar == std::string_view::npos ? std::nullopt : from_base64(text.substr(bar + 1));
  check_user(bytes.has_value(), argument, " must be a text made by shardwright (a label, '|' and base64), got '",
             text.substr(0, 80), "'");
  return *bytes;
}

}  // namespace shardwright
