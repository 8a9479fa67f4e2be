#include "layout/dtype.h"

#include <array>

#include "support/error.h"

namespace shardwright {
namespace {

struct Entry {
  DType::Id id;
  const char* name;
  int64_t size_bytes;
  DTypeKind kind;
};

// Indexed by id.
constexpr std::array<Entry, 21> kTable{{
    {DType::kFloat32, "float32", 4, DTypeKind::kFloat},
    {DType::kFloat64, "float64", 8, DTypeKind::kFloat},
    {DType::kFloat16, "float16", 2, DTypeKind::kFloat},
    {DType::kBFloat16, "bfloat16", 2, DTypeKind::kFloat},
    {DType::kBool, "bool", 1, DTypeKind::kBool},
    {DType::kUInt8, "uint8", 1, DTypeKind::kInteger},
    {DType::kInt8, "int8", 1, DTypeKind::kInteger},
    {DType::kInt16, "int16", 2, DTypeKind::kInteger},
    {DType::kInt32, "int32", 4, DTypeKind::kInteger},
    {DType::kInt64, "int64", 8, DTypeKind::kInteger},
    {DType::kUInt16, "uint16", 2, DTypeKind::kOpaque},
    {DType::kUInt32, "uint32", 4, DTypeKind::kOpaque},
    {DType::kUInt64, "uint64", 8, DTypeKind::kOpaque},
    {DType::kComplex32, "complex32", 4, DTypeKind::kOpaque},
    {DType::kComplex64, "complex64", 8, DTypeKind::kComplex},
    {DType::kComplex128, "complex128", 16, DTypeKind::kComplex},
    {DType::kFloat8E4M3FN, "float8_e4m3fn", 1, DTypeKind::kOpaque},
    {DType::kFloat8E4M3FNUZ, "float8_e4m3fnuz", 1, DTypeKind::kOpaque},
    {DType::kFloat8E5M2, "float8_e5m2", 1, DTypeKind::kOpaque},
    {DType::kFloat8E5M2FNUZ, "float8_e5m2fnuz", 1, DTypeKind::kOpaque},
    {DType::kFloat8E8M0FNU, "float8_e8m0fnu", 1, DTypeKind::kOpaque},
}};

constexpr bool is_in_order() {
  for (size_t i = 0; i < kTable.size(); ++i) {
    if (kTable[i].id != i) return false;
  }
  return kTable.size() == DType::kFloat8E8M0FNU + 1;
}
static_assert(is_in_order(), "kTable has one entry for each id, in their order");

// Other names: torch's own aliases, and the short names of papers and configuration files.
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
  for (const auto& [alias, name] : kAliases) {
    if (bare == alias) bare = name;
  }
  for (const Entry& entry : kTable) {
    if (bare == entry.name) return entry.id;
  }
  throw UserError(concat("dtype must be one of ", join(known_names()), ", got '", name, "'"));
}

std::vector<std::string> DType::known_names() {
  std::vector<std::string> names;
  for (const Entry& entry : kTable) names.emplace_back(entry.name);
  return names;
}

const std::string& DType::name() const {
  static const std::vector<std::string> names = known_names();
  return names[id_];
}

int64_t DType::size_bytes() const { return kTable[id_].size_bytes; }

DTypeKind DType::kind() const { return kTable[id_].kind; }

}  // namespace shardwright
