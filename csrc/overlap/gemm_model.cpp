#include "overlap/gemm_model.h"

#include <algorithm>
#include <map>

#include "layout/error.h"
#include "planner/cost.h"

namespace shardwright {
namespace {

// Rates are what large products reach, about 0.7 of the data sheets' peaks.
const std::map<std::string, GemmModel>& known() {
  static const std::map<std::string, GemmModel> models{
      {"h100", {"h100", 132, 128, 256, 5'300'000, 4'000'000, 300, 20}},
      {"a100", {"a100", 108, 128, 256, 2'200'000, 5'000'000, 600, 20}},
      {"cpu", {"cpu", 1, 16, 16, 100'000, 3'000'000, 100'000, 50}},
  };
  return models;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

GemmModel GemmModel::named(const std::string& name) {
  const auto found = known().find(name);
  check_user(found != known().end(), "gemm_model: '", name, "'; known are ", join(names()));
  return found->second;
}

std::vector<std::string> GemmModel::names() {
  std::vector<std::string> all;
  for (const auto& [name, model] : known()) all.push_back(name);
  return all;
}

void GemmModel::check() const {
  check_user(num_processors >= 1 && tile_rows >= 1 && tile_columns >= 1 && flops_per_us >= 1, "gemm_model: '", name,
             "' has ", num_processors, " processors, tiles of ", tile_rows, " x ", tile_columns, " and ", flops_per_us,
             " flops per us; allowed are 1 and more");
  check_user(launch_ps >= 0 && memory_ps_per_kib >= 0 && contention_percent >= 0, "gemm_model: '", name, "' has ",
             launch_ps, " ps per launch, ", memory_ps_per_kib, " ps per KiB and ", contention_percent,
             " percent of contention; allowed are 0 and more");
}

int64_t GemmModel::picoseconds(int64_t m, int64_t n, int64_t k, int64_t count, int64_t item_bytes) const {
  if (m == 0 || n == 0 || count == 0) return 0;
  const int64_t tiles =
      saturating_product(saturating_product(ceil_div(m, tile_rows), ceil_div(n, tile_columns)), count);
  const int64_t waves = ceil_div(tiles, num_processors);
  // Operands of 16 bits are 2 bytes: the rate halves as they double.
  const auto tile_flops = static_cast<__int128>(2) * tile_rows * tile_columns * k;
  const __int128 tile_ps = tile_flops * 1'000'000 * item_bytes / (2 * static_cast<__int128>(flops_per_us));
  const __int128 compute = tile_ps * waves;
  const int64_t elements =
      saturating_sum(saturating_sum(saturating_product(m, k), saturating_product(k, n)), saturating_product(m, n));
  const int64_t memory = scaled(saturating_product(saturating_product(elements, count), item_bytes), memory_ps_per_kib);
  constexpr auto kMost = static_cast<__int128>(int64_t{1} << 60);
  return saturating_sum(launch_ps, std::max(memory, static_cast<int64_t>(std::min(compute, kMost))));
}

}  // namespace shardwright
