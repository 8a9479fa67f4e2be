// Element types: their names in PyTorch ("float32", "bfloat16", ...), sizes in bytes, and kinds.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

// The kinds of types. A kind determines the reductions that are possible (why_not_reducible in layout/placement.h).
enum class DTypeKind {
  kBool,
  kInteger,
  kFloat,
  kComplex,
  kOpaque,  // can be moved, cannot be reduced: float8, complex32, and unsigned integers of 16 bits or more
};

class DType {
 public:
  enum Id : uint8_t {
    kFloat32,
    kFloat64,
    kFloat16,
    kBFloat16,
    kBool,
    kUInt8,
    kInt8,
    kInt16,
    kInt32,
    kInt64,
    kUInt16,
    kUInt32,
    kUInt64,
    kComplex32,
    kComplex64,
    kComplex128,
    kFloat8E4M3FN,
    kFloat8E4M3FNUZ,
    kFloat8E5M2,
    kFloat8E5M2FNUZ,
    kFloat8E8M0FNU,
  };

  constexpr DType(Id id) : id_(id) {}  // NOLINT: an Id is a DType

  // Returns the type with this name: "float32", "torch.float32", or a short name such as "fp32", "f32", "float",
  // "bf16", "i64" and "long". On other names, throws UserError that lists the known types.
  static DType parse(const std::string& name);
  static std::vector<std::string> known_names();  // by id

  constexpr Id id() const { return id_; }
  const std::string& name() const;  // PyTorch's name without "torch."
  int64_t size_bytes() const;
  DTypeKind kind() const;
  bool has_fractions() const { return kind() == DTypeKind::kFloat || kind() == DTypeKind::kComplex; }

  constexpr bool operator==(const DType&) const = default;

 private:
  Id id_;
};

}  // namespace shardwright
