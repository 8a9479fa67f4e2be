#include "products/compile.h"

#include "support/error.h"

namespace shardwright {

Program compile(const Matmul& matmul, const Schedule& schedule, int64_t position) {
  check(matmul, schedule);
  check_user(position >= 0 && position < plan_of(matmul).src.mesh().size(), "position: ", position,
             " is not on the mesh (", plan_of(matmul).src.mesh().to_string(), ")");
  const auto* gather = std::get_if<GatherMatmul>(&matmul);
  Program program = gather != nullptr ? compile_gather(*gather, schedule, position)
                                      : compile_scatter(std::get<MatmulScatter>(matmul), schedule, position);
  program.sms_left = schedule.sms_left;
  return program;
}

}  // namespace shardwright
