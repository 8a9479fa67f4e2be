// Exhaustive matching over variants.
#pragma once

#include <utility>
#include <variant>

namespace shardwright {

namespace detail {

template <typename... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};

}  // namespace detail

// Calls the case that accepts the alternative that the variant holds. A missing case is a compile error, so an
// alternative that is added later cannot be forgotten. Do not write a case for `const auto&`: it would defeat that.
//
//   match(operation, [](const Wait& o) { ... }, [](const IsTransfer auto& o) { ... },
//         [](const IsCompute auto& o) { ... });
template <typename Variant, typename... Cases>
decltype(auto) match(Variant&& variant, Cases&&... cases) {
  return std::visit(detail::Overloaded<std::decay_t<Cases>...>{std::forward<Cases>(cases)...},
                    std::forward<Variant>(variant));
}

}  // namespace shardwright
