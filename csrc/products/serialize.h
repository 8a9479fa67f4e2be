// Product problems and matmuls in the wire format (support/wire_format.h), and as the strings that operators take.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "products/matmul.h"
#include "products/product_problem.h"

namespace shardwright {

// Equal problems give equal bytes in every process, and different ones different bytes, so caches of graphs can compare
// their text. Reading throws UserError if the bytes are damaged, of another version, or describe a problem that `check`
// refuses.
std::string to_bytes(const ProductProblem& problem);
ProductProblem product_problem_from_bytes(std::string_view bytes);

std::string to_bytes(const Matmul& matmul, const Schedule& schedule);
std::pair<Matmul, Schedule> matmul_from_bytes(std::string_view bytes);

// True if these are the bytes of a matmul, not of a plan.
bool is_matmul(std::string_view bytes);

// "bsk,nk->bsn|base64"
std::string to_text(const ProductProblem& problem);
// "gather bsk,nk->bsn|base64"
std::string to_text(const Matmul& matmul, const Schedule& schedule);

}  // namespace shardwright
