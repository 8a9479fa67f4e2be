// Converts arguments from Python. If an argument has a wrong type, these functions throw UserError that names the
// argument, the allowed values and the given value; pybind11's own conversions list the signatures of the function
// instead. The GIL must be held.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <pybind11/typing.h>

#include <cstdint>
#include <exception>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "layout/rank.h"
#include "support/error.h"

namespace shardwright {

namespace py = pybind11;

// A parameter that pybind11 shows as a T in signatures and stubs, but for which it accepts any Python object. The
// functions below check and convert the object.
template <typename T>
class Typed : public py::object {
 public:
  using py::object::object;
  Typed(py::object value) : py::object(std::move(value)) {}
  static bool check_(const py::handle&) { return true; }
};

template <typename Item>
using TupleOf = py::typing::Tuple<Item, py::ellipsis>;  // a tuple of any length

// Returns integers as a Python tuple.
template <typename Item>
TupleOf<py::int_> tuple_of(const std::vector<Item>& integers) {
  return TupleOf<py::int_>(py::cast(integers));
}

// Returns an object and its type as text, for error messages: "1.5 (of type float)". Long texts are shortened.
inline std::string shown(const py::handle& handle) {
  constexpr size_t kMaxShown = 80;
  const auto ascii = py::reinterpret_steal<py::object>(PyObject_ASCII(handle.ptr()));
  const char* bytes = ascii ? PyUnicode_AsUTF8(ascii.ptr()) : nullptr;
  if (bytes == nullptr) PyErr_Clear();
  std::string text = bytes == nullptr ? "something that cannot be shown" : bytes;
  if (text.size() > kMaxShown) text = text.substr(0, kMaxShown) + "...";
  return concat(text, " (of type ", Py_TYPE(handle.ptr())->tp_name, ")");
}

// Returns an integer. Accepts any object that Python accepts as an index: ints, NumPy integers, tensors of one integer.
// In error messages, `prefix` precedes the name of the argument, such as "each item of ".
inline int64_t integer(const py::handle& handle, const char* argument, const char* prefix = "") {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(handle.ptr()));
  if (!index) {
    PyErr_Clear();
    throw UserError(concat(prefix, argument, " must be an integer, got ", shown(handle)));
  }
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) throw UserError(concat(prefix, argument, " must be a 64-bit integer, got ", shown(index)));
  return value;
}

// Returns the value of the argument `rank`.
inline Rank rank_of(const py::handle& handle) { return Rank{integer(handle, "rank")}; }

// Returns the text of a str.
inline std::string text(const py::handle& handle, const char* argument, const char* prefix = "") {
  if (!PyUnicode_Check(handle.ptr())) throw UserError(concat(prefix, argument, " must be a str, got ", shown(handle)));
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(handle.ptr(), &size);
  if (bytes == nullptr) {  // the str has half of a surrogate pair
    PyErr_Clear();
    throw UserError(concat(prefix, argument, " must be valid UTF-8, got ", shown(handle)));
  }
  return std::string(bytes, static_cast<size_t>(size));
}

// Returns the items of any iterable except text, each converted by `item`.
template <typename Item>
std::vector<Item> list(const py::handle& handle, const char* argument,
                       Item (*item)(const py::handle&, const char*, const char*)) {
  const bool is_text = PyUnicode_Check(handle.ptr()) || PyBytes_Check(handle.ptr());
  const auto iterator = py::reinterpret_steal<py::object>(is_text ? nullptr : PyObject_GetIter(handle.ptr()));
  if (!iterator) PyErr_Clear();
  if (!iterator) throw UserError(concat(argument, " must be a list, got ", shown(handle)));
  std::vector<Item> items;
  while (const auto next = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()))) {
    items.push_back(item(next, argument, "each item of "));
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return items;
}

// Returns the items of an iterable of integers.
inline std::vector<int64_t> integers(const py::handle& handle, const char* argument) {
  return list<int64_t>(handle, argument, integer);
}

// Returns the items of an iterable of str.
inline std::vector<std::string> texts(const py::handle& handle, const char* argument) {
  return list<std::string>(handle, argument, text);
}

// Returns the object as a T. T is one of our classes, for which a reference to Python's object is returned, or a Python
// type such as py::dict. `allowed` describes T in the error message.
template <typename T>
decltype(auto) object(const py::handle& handle, const char* argument, const char* allowed) {
  if (!py::isinstance<T>(handle)) throw UserError(concat(argument, " must be ", allowed, ", got ", shown(handle)));
  if constexpr (std::is_base_of_v<py::object, T>) {
    return py::reinterpret_borrow<T>(handle);
  } else {
    return handle.cast<const T&>();
  }
}

// Makes pybind11 raise ValueError for UserError, and RuntimeError for InvariantError. Bytes that are not UTF-8 are
// shown as \xff.
inline void register_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](PyObject* type, const std::string& text) {
      const auto size = static_cast<Py_ssize_t>(text.size());
      const auto message =
          py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(text.data(), size, "backslashreplace"));
      PyErr_SetObject(type, message.ptr());
    };
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const UserError& error) {
      raise(PyExc_ValueError, error.what());
    } catch (const InvariantError& error) {
      raise(PyExc_RuntimeError, error.what());
    }
  });
}

}  // namespace shardwright

template <typename T>
struct pybind11::detail::handle_type_name<shardwright::Typed<T>> {
  static constexpr auto name = make_caster<T>::name;
};
