#include "cost/lowering.h"

#include "support/error.h"

namespace shardwright {

const std::vector<Lowering>& Lowering::all() {
  static const std::vector<Lowering> lowerings{kNccl, kGloo};
  return lowerings;
}

const Lowering& Lowering::named(std::string_view name) {
  std::vector<std::string_view> names;
  for (const Lowering& lowering : all()) {
    if (lowering.name == name) return lowering;
    names.push_back(lowering.name);
  }
  throw UserError(concat("backend must be one of ", join(names), ", got '", name, "'"));
}

}  // namespace shardwright
