#include "cost/gemm_model.h"

#include <algorithm>
#include <array>
#include <map>

#include "cost/cost.h"
#include "cost/topology.h"
#include "support/ceil_divide.h"
#include "support/error.h"

namespace shardwright {
namespace {

// Built-in models, by name. The rates are about 70% of the peaks in data sheets, as large products reach them.
const std::map<std::string, GemmModel>& built_in_models() {
  static const std::map<std::string, GemmModel> models{
      {"h100", {"h100", 132, 128, 256, 5'300'000, 4'000'000, 300, 20}},
      {"a100", {"a100", 108, 128, 256, 2'200'000, 5'000'000, 600, 20}},
      {"cpu", {"cpu", 1, 16, 16, 100'000, 3'000'000, 100'000, 50}},
  };
  return models;
}

}  // namespace

GemmModel GemmModel::named(const std::string& name) {
  const auto found = built_in_models().find(name);
  if (found == built_in_models().end()) {
    throw UserError(concat("gemm_model must be one of ", join(names()), ", got '", name, "'"));
  }
  return found->second;
}

std::vector<std::string> GemmModel::names() {
  std::vector<std::string> all;
  for (const auto& [name, model] : built_in_models()) all.push_back(name);
  return all;
}

void GemmModel::check() const {
  const auto check_field = [&](const char* field, int64_t value, int64_t least) {
    check_user(value >= least && value <= Topology::kMaxValue, "gemm_model: ", field, " of '", name, "' must be ",
               InRange{least, Topology::kMaxValue}, ", got ", value);
  };
  check_field("num_processors", num_processors, 1);
  check_field("tile_rows", tile_rows, 1);
  check_field("tile_columns", tile_columns, 1);
  check_field("flops_per_us", flops_per_us, 1);
  check_field("launch_ps", launch_ps, 0);
  check_field("memory_ps_per_kib", memory_ps_per_kib, 0);
  check_field("contention_percent", contention_percent, 0);
  check_field("chunk_ps", chunk_ps, 0);
  check_field("transfer_processors", transfer_processors, 0);
}

int64_t GemmModel::picoseconds(int64_t m, int64_t n, int64_t k, int64_t count, int64_t item_bytes) const {
  if (m == 0 || n == 0 || count == 0) return 0;
  // By number of halvings: the time of one tile, and the number of tiles of all products.
  std::array<__int128, kMaxHalvings + 1> tile_ps;
  std::array<int64_t, kMaxHalvings + 1> tiles;
  int64_t rows = tile_rows;
  int64_t columns = tile_columns;
  for (int h = 0; h <= kMaxHalvings; ++h) {
    tiles[h] = saturating_product(saturating_product(ceil_divide(m, rows), ceil_divide(n, columns)), count);
    // The model's rate is for 2-byte operands; it is inversely proportional to their size.
    const __int128 flops = static_cast<__int128>(2) * rows * columns * k;
    const __int128 full_rate_ps = flops * 1'000'000 * item_bytes / (2 * static_cast<__int128>(flops_per_us));
    tile_ps[h] = full_rate_ps * (100 + h * kHalvingPercent) / 100;
    int64_t& longer_side = columns >= rows ? columns : rows;
    longer_side = std::max<int64_t>(longer_side / 2, 1);
  }
  // Tries each tile size for the full waves, and each smaller size for the tiles that are left for the last wave.
  auto compute = static_cast<__int128>(int64_t{1} << 60);
  for (int h = 0; h <= kMaxHalvings; ++h) {
    const int64_t rest = tiles[h] % num_processors;
    __int128 rest_ps = rest > 0 ? tile_ps[h] : 0;
    for (int g = h + 1; g <= kMaxHalvings && rest > 0; ++g) {
      rest_ps = std::min(rest_ps, tile_ps[g] * ceil_divide(rest << (g - h), num_processors));
    }
    compute = std::min(compute, tile_ps[h] * (tiles[h] / num_processors) + rest_ps);
  }
  const int64_t elements =
      saturating_sum(saturating_sum(saturating_product(m, k), saturating_product(k, n)), saturating_product(m, n));
  const int64_t memory =
      picoseconds_for(saturating_product(saturating_product(elements, count), item_bytes), memory_ps_per_kib);
  return saturating_sum(launch_ps, std::max(memory, static_cast<int64_t>(compute)));
}

int64_t GemmModel::waves(int64_t m, int64_t n, int64_t count) const {
  const int64_t tiles =
      saturating_product(saturating_product(ceil_divide(m, tile_rows), ceil_divide(n, tile_columns)), count);
  return std::max<int64_t>(ceil_divide(tiles, num_processors), 1);
}

GemmModel GemmModel::with_fewer_processors(int64_t processors) const {
  GemmModel rest = *this;
  rest.num_processors = std::max<int64_t>(num_processors - processors, 1);
  return rest;
}

GemmModel GemmModel::with_copy_engines() const {
  GemmModel model = *this;
  model.transfer_processors = 0;
  model.contention_percent = std::min(contention_percent, kCopyEngineContentionPercent);
  return model;
}

}  // namespace shardwright
