// Bytes in the wire format, written by hand.
#pragma once

#include <cstdint>
#include <string>

namespace shardwright::test {

inline std::string little_endian(uint64_t value) {
  std::string bytes;
  for (int shift = 0; shift < 64; shift += 8) bytes.push_back(static_cast<char>(value >> shift));
  return bytes;
}

// Appends the matching checksum (FNV-1a).
inline std::string closed(const std::string& body) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : body) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return body + little_endian(hash);
}

inline std::string without_checksum(std::string bytes) {
  bytes.resize(bytes.size() - 8);
  return bytes;
}

}  // namespace shardwright::test
