// Operators on the test device: the CPU's kernels run on the same memory, on the thread of the current stream.
//
// One fallback serves nearly all operators. Operators that write to their arguments are given to the stream as they
// are. Operators that return new tensors run on meta tensors first, which give the sizes to allocate. Others (with
// results that depend on values, or without results) wait for the stream and run on the CPU. Views are made at once.
#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/nll_loss_forward.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/sort.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <set>

#include "allocator.h"
#include "driver.h"

namespace async_device {
namespace {

using torch::jit::Stack;

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == kDeviceType; }

// Returns a CPU tensor on the same memory, which does not own it. A CPU tensor is copied, because it may change before
// the stream runs the operator.
at::Tensor on_cpu(const at::Tensor& t) {
  if (!t.defined()) return t;
  if (!is_ours(t)) return t.device().is_cpu() ? t.detach().clone() : t;
  at::Tensor alias = at::from_blob(t.numel() == 0 ? nullptr : t.data_ptr(), t.sizes(), t.strides(),
                                   at::TensorOptions(t.scalar_type()).device(at::kCPU));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  alias._set_conj(t.is_conj());
  alias._set_neg(t.is_neg());
  return alias;
}

at::Tensor on_meta(const at::Tensor& t) {
  if (!t.defined()) return t;
  at::Tensor meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).requires_grad(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}

template <typename Change>
c10::IValue changed(const c10::IValue& value, const Change& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector()) {
      list.push_back(t ? std::optional(change(*t)) : std::nullopt);
    }
    return list;
  }
  return value;
}

// Calls an operator on the thread of a stream.
void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  // In torch 2.11, a check of reference counts fails when the stack is destroyed after the boxed call of these
  // variants.
  const std::string name = toString(op.operator_name());
  if (name == "aten::nll_loss_forward.output") {
    const auto [loss, weight] =
        at::nll_loss_forward(stack[0].toTensor(), stack[1].toTensor(), stack[2].toOptional<at::Tensor>(),
                             stack[3].toInt(), stack[4].toSymInt().expect_int());
    stack[5].toTensor().copy_(loss);
    stack[6].toTensor().copy_(weight);
    return;
  }
  if (name == "aten::sort.values_stable") {
    const auto [values, indices] =
        at::sort(stack[0].toTensor(), stack[1].toOptional<bool>(), stack[2].toInt(), stack[3].toBool());
    stack[4].toTensor().copy_(values);
    stack[5].toTensor().copy_(indices);
    return;
  }
  op.callBoxed(stack);
}

std::set<std::string>& synchronous() {
  static auto* names = new std::set<std::string>;  // operators whose results meta tensors cannot give
  return *names;
}
std::mutex names_mutex;

void by_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const std::string what = toString(op.operator_name()) + ", which synchronizes,";
  forbid_in_capture(what.c_str());
  at::native::cpu_fallback(op, stack);
}

// Returns the result of a call on meta tensors, or nothing if it does not give the sizes to allocate.
std::optional<std::vector<at::Tensor>> results_on_meta(const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> args) {
  const std::string name = toString(op.operator_name());
  {
    const std::lock_guard<std::mutex> lock(names_mutex);
    if (synchronous().contains(name)) return std::nullopt;
  }
  Stack stack;
  for (const c10::IValue& arg : args) {
    if (arg.isDevice()) return std::nullopt;
    stack.push_back(changed(arg, on_meta));
  }
  std::vector<at::Tensor> results;
  try {
    const at::AutoDispatchBelowADInplaceOrView guard;
    op.callBoxed(stack);
    for (const c10::IValue& value : stack) {
      TORCH_CHECK(value.isTensor() && value.toTensor().defined(), "not only tensors");
      results.push_back(value.toTensor());
    }
  } catch (const std::exception&) {  // the CPU's kernel reports other errors
    const std::lock_guard<std::mutex> lock(names_mutex);
    synchronous().insert(name);
    return std::nullopt;
  }
  return results;
}

// Returns the device of the first argument on this device, or the current device if there is none.
c10::Device device_of(c10::ArrayRef<c10::IValue> args) {
  for (const c10::IValue& arg : args) {
    if (arg.isTensor() && is_ours(arg.toTensor())) return arg.toTensor().device();
    if (!arg.isTensorList()) continue;
    for (const at::Tensor& tensor : arg.toTensorVector()) {
      if (is_ours(tensor)) return tensor.device();
    }
  }
  return device();
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const size_t num_args = schema.arguments().size();
  const auto args = torch::jit::last(*stack, num_args);
  const OnDevice on_device(device_of(args));
  bool writes = false;
  bool grows = false;
  for (size_t i = 0; i < num_args; ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    writes = true;
    const bool is_out = schema.arguments()[i].is_out();
    if (is_out && args[i].isTensor() && args[i].toTensor().numel() == 0) grows = true;
  }
  // An empty result must be resized, unless an operand is empty too.
  grows = grows && std::none_of(args.begin(), args.end(), [&](const c10::IValue& arg) {
            const bool is_result = schema.arguments()[&arg - args.begin()].is_out();
            return !is_result && arg.isTensor() && arg.toTensor().defined() && arg.toTensor().numel() == 0;
          });
  if (schema.returns().empty() && !writes) return by_cpu(op, stack);
  const bool is_view = !writes && schema.returns()[0].alias_info() != nullptr;
  TORCH_CHECK(!is_view, "async_device: ", op.operator_name(), " is a view that this device does not know");

  if (writes) {
    if (grows) return by_cpu(op, stack);
    Stack copy;
    for (const c10::IValue& arg : args) copy.push_back(changed(arg, on_cpu));
    launch(current_stream(), [op, copy]() mutable { call(op, copy); });
    Stack returned;
    for (const c10::Argument& result : schema.returns()) {
      for (size_t i = 0; i < num_args; ++i) {
        const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
        if (result.alias_info() != nullptr && alias != nullptr && *result.alias_info() == *alias) {
          returned.push_back(args[i]);
          break;
        }
      }
    }
    TORCH_CHECK(returned.size() == schema.returns().size(), "async_device: ", op.operator_name(),
                " writes to arguments and returns others");
    torch::jit::drop(*stack, num_args);
    for (c10::IValue& value : returned) stack->push_back(std::move(value));
    return;
  }

  const auto metas = results_on_meta(op, args);
  if (!metas) return by_cpu(op, stack);
  Stack copy;
  for (const c10::IValue& arg : args) copy.push_back(changed(arg, on_cpu));
  std::vector<at::Tensor> results;
  std::vector<at::Tensor> places;
  for (const at::Tensor& meta : *metas) {
    results.push_back(at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device())));
    places.push_back(on_cpu(results.back()));
  }
  launch(current_stream(), [op, copy, places]() mutable {
    call(op, copy);
    const at::AutoDispatchBelowADInplaceOrView guard;
    for (size_t i = 0; i < places.size(); ++i) places[i].copy_(copy[i].toTensor());
  });
  torch::jit::drop(*stack, num_args);
  for (at::Tensor& result : results) stack->push_back(std::move(result));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> where, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const OnDevice on_device(where && where->has_index() ? *where : device());
  return at::detail::empty_generic(size, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> where, std::optional<bool>) {
  const OnDevice on_device(where && where->has_index() ? *where : device());
  return at::detail::empty_strided_generic(
      size, stride, allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

bool may_stay_behind(const at::Tensor& on_host, bool non_blocking) {
  return non_blocking && is_pinned(on_host.storage().data());
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) return to;
  TORCH_CHECK(!is_ours(to) || !is_ours(from) || to.device() == from.device(),
              "async_device: copies from one of its devices to another are not known");
  const OnDevice on_device(is_ours(to) ? to.device() : from.device());
  if (is_ours(to)) {
    // Copies pageable memory first, which the caller may free or overwrite at once.
    const bool is_late = !is_ours(from) && may_stay_behind(from, non_blocking);
    if (!is_ours(from) && !is_late) forbid_in_capture("copying from memory of the host");
    const at::Tensor expanded = from.expand_as(to);
    launch(current_stream(), [source = is_late ? expanded : on_cpu(expanded), target = on_cpu(to)]() mutable {
      const at::AutoDispatchBelowADInplaceOrView guard;
      target.copy_(source);
    });
    return to;
  }
  if (may_stay_behind(to, non_blocking)) {
    launch(current_stream(), [source = on_cpu(from), target = to]() mutable {
      const at::AutoDispatchBelowADInplaceOrView guard;
      target.copy_(source);
    });
    return to;
  }
  forbid_in_capture("copying to memory of the host");
  synchronize(current_stream());
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor target = to;
  target.copy_(on_cpu(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const at::Tensor& self) {
  forbid_in_capture("reading a value");
  synchronize(current_stream(self.device()));
  return on_cpu(self).item();
}

void record_stream_of(at::Tensor& self, c10::Stream stream) { record_stream(self.storage().data_ptr(), stream); }

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, size, format);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::cpu::set_(self, source, offset, size, stride);
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) { return at::cpu::set_(self, source); }

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("unfold", &at::native::unfold);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream_of);
}

// Conjugate and negative views are resolved while they are copied.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace async_device
