// Product problems and matmuls in the wire format (support/wire_format.h), and as the strings that operators take.
#pragma once

#include <string>
#include <string_view>
#include <utility>

#include "products/matmul.h"
#include "products/product_problem.h"

namespace shardwright {

// Equal problems have equal bytes in every process, and different problems have different bytes, so caches of graphs
// can compare the text of problems. Reading throws UserError if the bytes are damaged, of another version, or describe
// a problem that `check` rejects.
std::string to_bytes(const ProductProblem& problem);
ProductProblem product_problem_from_bytes(std::string_view bytes);

// Equal matmuls with equal schedules have equal bytes. Reading throws UserError if the bytes are damaged, of another
// version, or describe a matmul or schedule that `check` rejects.
std::string to_bytes(const Matmul& matmul, const Schedule& schedule);
std::pair<Matmul, Schedule> matmul_from_bytes(std::string_view bytes);

// Returns true if to_bytes(matmul, schedule) wrote these bytes, false for all other bytes. Does not check if they are
// damaged.
bool is_matmul(std::string_view bytes);

// Returns the axes of the first product, and the bytes in base64: "bsk,nk->bsn|base64".
std::string to_text(const ProductProblem& problem);
// Returns the kind of matmul, the axes of its first product (Contraction::to_string) and the bytes in base64:
// "gather abc,dc->abd|base64".
std::string to_text(const Matmul& matmul, const Schedule& schedule);

}  // namespace shardwright
