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

// Calls the case whose parameter is the alternative in the variant, and returns its result. A missing case is a compile
// error, so an alternative that is added later cannot be forgotten. A case for `const auto&` would hide such an error.
//
//   match(operation, [](const Wait& o) { ... }, [](const IsTransfer auto& o) { ... },
//         [](const IsCompute auto& o) { ... });
template <typename Variant, typename... Cases>
decltype(auto) match(Variant&& variant, Cases&&... cases) {
  return std::visit(detail::Overloaded<std::decay_t<Cases>...>{std::forward<Cases>(cases)...},
                    std::forward<Variant>(variant));
}

}  // namespace shardwright
