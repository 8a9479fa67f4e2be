#include "layout/dtype.h"

#include <array>

#include "support/error.h"

namespace shardwright {
namespace {

struct Entry {
  const char* name;
  int64_t size_bytes;
  DTypeKind kind;
};

constexpr std::array<Entry, 21> kTable{{
    {"float32", 4, DTypeKind::kFloat},
    {"float64", 8, DTypeKind::kFloat},
    {"float16", 2, DTypeKind::kFloat},
    {"bfloat16", 2, DTypeKind::kFloat},
    {"bool", 1, DTypeKind::kBool},
    {"uint8", 1, DTypeKind::kInteger},
    {"int8", 1, DTypeKind::kInteger},
    {"int16", 2, DTypeKind::kInteger},
    {"int32", 4, DTypeKind::kInteger},
    {"int64", 8, DTypeKind::kInteger},
    {"uint16", 2, DTypeKind::kOpaque},
    {"uint32", 4, DTypeKind::kOpaque},
    {"uint64", 8, DTypeKind::kOpaque},
    {"complex32", 4, DTypeKind::kOpaque},
    {"complex64", 8, DTypeKind::kComplex},
    {"complex128", 16, DTypeKind::kComplex},
    {"float8_e4m3fn", 1, DTypeKind::kOpaque},
    {"float8_e4m3fnuz", 1, DTypeKind::kOpaque},
    {"float8_e5m2", 1, DTypeKind::kOpaque},
    {"float8_e5m2fnuz", 1, DTypeKind::kOpaque},
    {"float8_e8m0fnu", 1, DTypeKind::kOpaque},
}};

// What else they are called: torch's own second names, and the short ones of papers and configuration files.
constexpr std::array<std::array<const char*, 2>, 28> kAliases{{
    {"bf16", "bfloat16"},
    {"half", "float16"},
    {"fp16", "float16"},
    {"f16", "float16"},
    {"float", "float32"},
    {"fp32", "float32"},
    {"f32", "float32"},
    {"double", "float64"},
    {"fp64", "float64"},
    {"f64", "float64"},
    {"i8", "int8"},
    {"i16", "int16"},
    {"short", "int16"},
    {"i32", "int32"},
    {"int", "int32"},
    {"i64", "int64"},
    {"long", "int64"},
    {"u8", "uint8"},
    {"u16", "uint16"},
    {"u32", "uint32"},
    {"u64", "uint64"},
    {"chalf", "complex32"},
    {"c64", "complex64"},
    {"cfloat", "complex64"},
    {"c128", "complex128"},
    {"cdouble", "complex128"},
    {"f8e4m3", "float8_e4m3fn"},
    {"f8e5m2", "float8_e5m2"},
}};

}  // namespace

DType DType::parse(const std::string& name) {
  const std::string prefix = "torch.";
  std::string bare = name.rfind(prefix, 0) == 0 ? name.substr(prefix.size()) : name;
  for (const auto& [alias, usual] : kAliases) {
    if (bare == alias) bare = usual;
  }
  for (const Entry& entry : kTable) {
    if (bare == entry.name) return DType(entry.name, entry.size_bytes, entry.kind);
  }
  throw UserError(concat("dtype: '", name, "' is not known; allowed are ", join(known_names())));
}

std::vector<std::string> DType::known_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kTable) names.emplace_back(entry.name);
  return names;
}

}  // namespace shardwright
