// Exhaustive case distinctions over variants.
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

// Calls the case that takes what the variant holds. Without a case for one of the alternatives it does not compile, so
// an alternative that is added later cannot be forgotten. Cases for `const auto&` defeat that; write none.
//
//   match(operation, [](const Wait& o) { ... }, [](const IsTransfer auto& o) { ... },
//         [](const IsCompute auto& o) { ... });
template <typename Variant, typename... Cases>
decltype(auto) match(Variant&& variant, Cases&&... cases) {
  return std::visit(detail::Overloaded<std::decay_t<Cases>...>{std::forward<Cases>(cases)...},
                    std::forward<Variant>(variant));
}

}  // namespace shardwright
