// Element types under PyTorch's names ("float32", "bfloat16", ...), with what moving and reducing needs to know of
// them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardwright {

enum class DTypeKind {
  kBool,
  kInteger,
  kFloat,
  kComplex,
  kOpaque,  // can be moved, cannot be reduced (float8 and other packed formats)
};

class DType {
 public:
  // Accepts "float32", "torch.float32" and short names: "fp32", "f32" and "float", "bf16", "i64" and "long". Throws
  // UserError naming the known types.
  static DType parse(const std::string& name);
  static std::vector<std::string> known_names();

  const std::string& name() const { return name_; }
  int64_t size_bytes() const { return size_bytes_; }
  DTypeKind kind() const { return kind_; }

  bool operator==(const DType& other) const { return name_ == other.name_; }

 private:
  DType(std::string name, int64_t size_bytes, DTypeKind kind)
      : name_(std::move(name)), size_bytes_(size_bytes), kind_(kind) {}

  std::string name_;
  int64_t size_bytes_;
  DTypeKind kind_;
};

}  // namespace shardwright
