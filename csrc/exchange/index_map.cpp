#include "exchange/index_map.h"

#include <algorithm>

#include "support/error.h"

namespace shardwright {
namespace {

// Returns the text of one side of an axis: "0[3]" if the dim is fixed, else "0[4:8]".
std::string side_text(int dim, int64_t begin, int64_t length, bool is_fixed) {
  return is_fixed ? concat(dim, "[", begin, "]") : concat(dim, "[", begin, ":", begin + length, "]");
}

// Checks one side of all axes: every dim of `shape` must be on one axis, and every range within its dim.
void check_side(const std::vector<Window>& windows, const std::vector<int64_t>& shape, const std::string& side,
                const std::string& argument) {
  std::vector<int> num_axes(shape.size(), 0);  // by dim
  for (const Window& window : windows) {
    if (window.tensor_dim == Window::kNoDim) {
      check_user(window.begin == 0 && window.length == 1, argument, ": begin and length of an axis without a ", side,
                 " dim must be 0 and 1, got ", window.begin, " and ", window.length);
      continue;
    }
    const auto ndim = static_cast<int>(shape.size());
    if (window.tensor_dim < 0 || window.tensor_dim >= ndim) {
      throw UserError(
          concat(argument, ": ", side, " dim must be a dim of the shape [", join(shape), "], got ", window.tensor_dim));
    }
    ++num_axes[window.tensor_dim];
    const int64_t size = shape[window.tensor_dim];
    check_user(window.begin >= 0 && window.length >= 0 && window.begin <= size && window.length <= size - window.begin,
               argument, ": range of ", side, " dim ", window.tensor_dim, " must be within [0, ", size, "), got begin ",
               window.begin, " and length ", window.length);
  }
  for (size_t d = 0; d < num_axes.size(); ++d) {
    check_user(num_axes[d] == 1, argument, ": ", side, " dim ", d, " must be on one axis, got ", num_axes[d], " axes");
  }
}

}  // namespace

IndexMap IndexMap::identity(const std::vector<int64_t>& shape) {
  std::vector<MapAxis> axes;
  for (size_t d = 0; d < shape.size(); ++d) axes.push_back({static_cast<int>(d), static_cast<int>(d), 0, 0, shape[d]});
  return IndexMap(std::move(axes));
}

std::vector<Window> IndexMap::src_windows() const {
  std::vector<Window> windows;
  for (const MapAxis& axis : axes_) windows.push_back({axis.src_dim, axis.src_begin, axis.length});
  return windows;
}

std::vector<Window> IndexMap::dst_windows() const {
  std::vector<Window> windows;
  for (const MapAxis& axis : axes_) windows.push_back({axis.dst_dim, axis.dst_begin, axis.length});
  return windows;
}

int64_t IndexMap::num_elements() const {
  int64_t elements = 1;
  for (const MapAxis& axis : axes_) elements *= axis.length;
  return elements;
}

std::vector<int64_t> IndexMap::encoding() const {
  std::vector<int64_t> numbers;
  for (const MapAxis& axis : axes_) {
    numbers.insert(numbers.end(), {axis.src_dim, axis.dst_dim, axis.src_begin, axis.dst_begin, axis.length});
  }
  return numbers;
}

void IndexMap::check(const std::vector<int64_t>& src_shape, const std::vector<int64_t>& dst_shape,
                     const std::string& argument) const {
  for (const MapAxis& axis : axes_) {
    check_user(axis.src_dim != MapAxis::kNoDim || axis.dst_dim != MapAxis::kNoDim, argument,
               ": axis must have a source dim or a destination dim, got neither");
    check_user(axis.length == 1 || (axis.src_dim != MapAxis::kNoDim && axis.dst_dim != MapAxis::kNoDim), argument,
               ": length of an axis that lacks a source or destination dim must be 1, got ", axis.length);
  }
  check_side(src_windows(), src_shape, "source", argument);
  check_side(dst_windows(), dst_shape, "destination", argument);
}

std::string IndexMap::to_string() const {
  std::vector<std::string> texts;
  for (const MapAxis& axis : axes_) {
    const bool is_fixed = axis.src_dim == MapAxis::kNoDim || axis.dst_dim == MapAxis::kNoDim;
    std::string text;
    if (axis.src_dim != MapAxis::kNoDim) text += side_text(axis.src_dim, axis.src_begin, axis.length, is_fixed);
    text += axis.dst_dim == MapAxis::kNoDim ? " ->" : axis.src_dim == MapAxis::kNoDim ? "-> " : " -> ";
    if (axis.dst_dim != MapAxis::kNoDim) text += side_text(axis.dst_dim, axis.dst_begin, axis.length, is_fixed);
    texts.push_back(std::move(text));
  }
  return join(texts);
}

}  // namespace shardwright
