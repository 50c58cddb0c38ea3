// Torch's operators: shapes on the host from torch's meta kernels, values in the stream's thread from its CPU kernels.
//
// One boxed fallback serves all that computes; what allocates, views, copies or reads a value has a function here. An
// operator whose result has no shape before it has run (nonzero) makes the host wait, as on CUDA.
#include "operators.hpp"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <set>

#include "guard.hpp"
#include "worker.hpp"

namespace sim {
namespace {

using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

// ---- names ----------------------------------------------------------------------------------------------------------
std::string class_of(const std::string& name) {
  static const std::set<std::string> matmul{
      "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmv", "aten::mv", "aten::dot", "aten::linear",
      "aten::convolution_overrideable", "aten::_convolution", "aten::convolution_backward",
      "aten::convolution_backward_overrideable", "aten::mkldnn_convolution", "aten::_slow_conv2d_forward",
      "aten::_slow_conv2d_backward", "aten::_scaled_dot_product_flash_attention_for_cpu",
      "aten::_scaled_dot_product_flash_attention_for_cpu_backward", "aten::_addmm_activation"};
  static const std::set<std::string> memset{"aten::fill_", "aten::zero_"};
  if (matmul.count(name) > 0) return "matmul";
  return memset.count(name) > 0 ? "memset" : "elementwise";
}

// Their meta kernels cannot know the shape, or the result is a value of the host.
bool needs_values(const std::string& name) {
  static const std::set<std::string> names{"aten::nonzero",       "aten::_unique2", "aten::unique_dim",
                                           "aten::masked_select", "aten::equal",    "aten::is_nonzero"};
  return names.count(name) > 0;
}

// ---- arguments ------------------------------------------------------------------------------------------------------
at::Tensor argument(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return host_alias(tensor);
  // The host's values as they are at the launch; and never the caller's own tensor: Python may hang on it, whose lock a
  // stream's thread would have to wait for when it lets go.
  auto values = tensor.detach().clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) values.unsafeGetTensorImpl()->set_wrapped_number(true);
  return values;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  // A Python number stays where it is: meta kernels written in Python take it on the CPU only.
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
}

template <class Map>
IValue mapped(const IValue& value, Map map, c10::DeviceType device) {
  if (value.isTensor()) return map(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(map(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor ? std::optional<at::Tensor>(map(*tensor)) : tensor);
    }
    return list;
  }
  if (value.isDevice()) return c10::Device(device);
  return value;
}

template <class Each>
void each_tensor(const IValue& value, Each each) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) each(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorVector()) {
      if (tensor.defined()) each(tensor);
    }
  } else if (value.isOptionalTensorList()) {
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      if (tensor && tensor->defined()) each(*tensor);
    }
  }
}

Device target_of(const std::string& name, const Stack& arguments) {
  std::optional<Device> found;
  for (const auto& one : arguments) {
    each_tensor(one, [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      TORCH_CHECK(!found || *found == tensor.device(), name,
                  ": Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
                  tensor.device(), "!");
      found = tensor.device();
    });
  }
  return found ? *found : Device(CUDA, static_cast<c10::DeviceIndex>(current_device()));
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// ---- launching ------------------------------------------------------------------------------------------------------
void launch(const std::string& kind, const std::string& length_class, const std::string& name, int64_t bytes,
            const std::vector<Touched>& touched, std::function<void()> compute) {
  const auto length_ns = length_of(length_class, name, bytes);
  const auto delay_ns = settings()->real_operator_ns;
  current_stream().launch({kind, name, length_ns, bytes}, touched, [=, compute = std::move(compute)](int64_t start_ns) {
    if (delay_ns > 0) sleep_until_real_ns(real_now_ns() + delay_ns);
    compute();
    return start_ns + length_ns;
  });
}

std::string kind_of(const std::string& length_class) {
  if (length_class == "memset") return "memset";
  return length_class.rfind("copy", 0) == 0 ? "copy" : "op";
}

// Runs it in the stream and makes the host wait for it; what it throws is thrown here.
void launch_and_wait(const std::string& length_class, const std::string& name, const char* said, int64_t bytes,
                     const std::vector<Touched>& touched, std::function<void()> compute) {
  auto error = std::make_shared<std::string>();
  launch(kind_of(length_class), length_class, name, bytes, touched, [compute = std::move(compute), error] {
    try {
      compute();
    } catch (const std::exception& thrown) {
      *error = thrown.what();
    }
  });
  count("blocking_calls");
  synchronize_stream(current_stream(), said, /*by_operator=*/true);
  TORCH_CHECK(error->empty(), *error);
}

// An empty one-dimensional `out=` tensor gets its size on the host, as on a real device: its CPU kernel would resize
// the alias, which nobody sees.
void size_outputs(const c10::OperatorHandle& op, const Stack& arguments) {
  const auto& schema = op.schema();
  bool unsized = false;
  auto is_out = [&](size_t i) {
    return writes(schema.arguments()[i]) && schema.arguments()[i].kwarg_only() && arguments[i].isTensor();
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_out(i) && arguments[i].toTensor().dim() == 1 && arguments[i].toTensor().numel() == 0) unsized = true;
  }
  if (!unsized || !op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return;
  Stack meta;
  for (const auto& one : arguments) meta.push_back(mapped(one, meta_of, c10::kMeta));
  const Stack sized = meta;
  op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta);
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (is_out(i) && arguments[i].toTensor().sizes() != sized[i].toTensor().sizes()) {
      arguments[i].toTensor().resize_(sized[i].toTensor().sizes());
    }
  }
}

// What it returns: arguments it has written, and None for what is new.
Stack returned(const c10::OperatorHandle& op, const Stack& arguments, bool& fresh, bool& tensors_only) {
  const auto& schema = op.schema();
  Stack outputs;
  for (const auto& one : schema.returns()) {
    const auto* alias = one.alias_info();
    if (alias == nullptr) {
      fresh = true;
      outputs.emplace_back();
      auto type = one.type();
      if (type->kind() == c10::TypeKind::ListType) type = type->containedType(0);
      if (type->kind() != c10::TypeKind::TensorType) tensors_only = false;
      continue;
    }
    TORCH_CHECK(alias->isWrite(), "simulated device: a view without a function of its own: ", schema.operator_name());
    for (size_t i = 0; i < arguments.size(); ++i) {
      const auto* own = schema.arguments()[i].alias_info();
      if (own != nullptr && own->isWrite() && *own == *alias) {
        outputs.push_back(arguments[i]);
        break;
      }
    }
  }
  return outputs;
}

void copy_results(const Stack& into, const Stack& from) {
  auto put = [](const at::Tensor& to, const at::Tensor& value) {
    if (to.defined() && value.defined() && !to.is_same(value)) to.copy_(value);
  };
  for (size_t i = 0; i < into.size(); ++i) {
    if (into[i].isTensor()) {
      put(into[i].toTensor(), from[i].toTensor());
    } else if (into[i].isTensorList()) {
      const auto to = into[i].toTensorVector(), values = from[i].toTensorVector();
      for (size_t k = 0; k < to.size(); ++k) put(to[k], values[k]);
    }
  }
}

void compute(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto name = schema.name();
  const auto number = schema.arguments().size();
  const Stack arguments(stack->end() - static_cast<int64_t>(number), stack->end());
  const Device target = target_of(name, arguments);
  const c10::DeviceGuard on(target);
  size_outputs(op, arguments);

  Stack host;
  std::vector<Touched> touched;
  for (size_t i = 0; i < number; ++i) {
    host.push_back(mapped(arguments[i], argument, c10::kCPU));
    const auto& declared = schema.arguments()[i];
    each_tensor(arguments[i], [&](const at::Tensor& tensor) { touch(touched, tensor, writes(declared)); });
    // The device's own generator: numbers are drawn in the order of the stream.
    if (declared.type()->repr_str().find("Generator") != std::string::npos && host.back().isNone()) {
      host.back() = generator_of(target.index());
    }
  }
  bool fresh = false, tensors_only = true;
  Stack outputs = returned(op, arguments, fresh, tensors_only);
  if (fresh) {
    Stack meta;
    bool shaped = tensors_only && !needs_values(name) && op.hasComputedKernelForDispatchKey(DispatchKey::Meta);
    if (shaped) {
      for (const auto& one : arguments) meta.push_back(mapped(one, meta_of, c10::kMeta));
      try {
        op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &meta);
      } catch (const c10::NotImplementedError&) {
        shaped = false;
      }
    }
    if (!shaped) {
      auto results = std::make_shared<Stack>(host);
      launch_and_wait(class_of(name), name, name.c_str(), 0, touched,
                      [op, results] { op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), results.get()); });
      torch::jit::drop(*stack, number);
      for (size_t i = 0; i < outputs.size(); ++i) {
        auto to_device = [&](const at::Tensor& tensor) {
          if (!tensor.defined()) return tensor;
          auto made = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(target));
          current_stream().drain();  // behind the poison: no copy of its own, the operator has written it
          host_alias(made).copy_(tensor);
          return made;
        };
        stack->push_back(outputs[i].isNone() ? mapped((*results)[i], to_device, CUDA) : outputs[i]);
      }
      return;
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      if (!outputs[i].isNone()) continue;
      auto allocated = [&](const at::Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(target));
      };
      outputs[i] = mapped(meta[i], allocated, CUDA);
      each_tensor(outputs[i], [&](const at::Tensor& tensor) { touch(touched, tensor, true); });
    }
  }
  int64_t bytes = 0;
  for (const auto& one : touched) {
    if (one.write) bytes += static_cast<int64_t>(one.region.rows * one.region.row_bytes);
  }
  Stack host_outputs;
  for (const auto& one : outputs) host_outputs.push_back(mapped(one, host_alias, c10::kCPU));
  const auto length_class = class_of(name);
  launch(kind_of(length_class), length_class, name, bytes, touched, [op, host, host_outputs, fresh] {
    Stack results = host;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &results);
    if (fresh) copy_results(host_outputs, results);
  });
  torch::jit::drop(*stack, number);
  for (auto& one : outputs) stack->push_back(std::move(one));
}

// ---- memory and views -----------------------------------------------------------------------------------------------
Device given_or_current(std::optional<Device> device) {
  return device && device->index() >= 0 ? *device : Device(CUDA, static_cast<c10::DeviceIndex>(current_device()));
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard on(given_or_current(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), device_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard on(given_or_current(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           device_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
  const auto from = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), from);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                        c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.size() == sizes.size()) {
    impl->set_sizes_and_strides(sizes, strides);
  } else {
    impl->set_sizes_contiguous(sizes);
  }
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.dtype().itemsize());
  return set_storage(self, storage, 0, c10::SymIntArrayRef({c10::SymInt(elements)}), {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.dtype().itemsize(),
                                                                static_cast<size_t>(self.storage_offset()));
  if (bytes > self.storage().nbytes()) {
    resize_storage(self.storage().unsafeGetStorageImpl(), bytes, self.device().index());
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

void record_tensor(at::Tensor& self, c10::Stream stream) {
  sim::record_stream(self.storage().data_ptr(), from_c10(stream));
}

// ---- values between host and device ---------------------------------------------------------------------------------
// Keeps the host's memory while the copy is on its way, without what Python may have hung on the tensor.
at::Tensor held(const at::Tensor& tensor) { return tensor.detach(); }

void copy_between_devices(at::Tensor& self, const at::Tensor& source) {
  // On the source's stream, which both sides wait for in turn, as CUDA copies between peers.
  auto& from = current_stream(source.device().index());
  auto& to = current_stream(self.device().index());
  from.wait(to.record());
  {
    const c10::DeviceGuard on(source.device());
    std::vector<Touched> touched;
    touch(touched, self, true);
    touch(touched, source, false);
    launch("copy", "copy_d2d", "aten::copy_", bytes_of(self), touched,
           [to = host_alias(self), from = host_alias(source)] { to.copy_(from.expand_as(to)); });
  }
  to.wait(from.record());
}

// Whether a copy within the device only moves bytes.
bool bytes_only(const at::Tensor& self, const at::Tensor& source) {
  return self.dtype() == source.dtype() && self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg() &&
         self.sizes() == source.sizes() &&
         ((self.is_contiguous() && source.is_contiguous()) ||
          (self.strides() == source.strides() && self.is_non_overlapping_and_dense()));
}

at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source) || self.numel() == 0) return self;
  if (self.is_cuda() && source.is_cuda() && self.device() != source.device()) {
    copy_between_devices(self, source);
    return self;
  }
  const c10::DeviceGuard on(self.is_cuda() ? self.device() : source.device());
  const bool to_host = !self.is_cuda(), from_host = !source.is_cuda();
  const auto& host_side = to_host ? self : source;
  const bool pinned = (to_host || from_host) && is_pinned(host_side.storage().data());
  const std::string kind = to_host ? "copy_d2h" : from_host ? "copy_h2d" : "copy_d2d";
  const std::string name = to_host ? "memcpy_d2h" : from_host ? "memcpy_h2d" : "aten::copy_";
  std::vector<Touched> touched;
  touch(touched, self, true);
  touch(touched, source, false);
  // What is not page-locked is staged: its values are taken now.
  const auto from = !from_host ? host_alias(source) : pinned && non_blocking ? held(source) : source.detach().clone();
  const auto to = to_host ? held(self) : host_alias(self);
  auto move = [to, from] { to.copy_(from.expand_as(to)); };
  const bool waits = to_host ? !(non_blocking && pinned) : from_host && !non_blocking;
  if (!to_host && !from_host && !bytes_only(self, source)) {  // a kernel converts or rearranges, as on CUDA
    launch("op", "elementwise", name, bytes_of(self), touched, move);
  } else if (waits) {
    launch_and_wait(kind, name, to_host ? "copy to the host" : "copy from the host", bytes_of(self), touched, move);
  } else {
    launch("copy", kind, name, bytes_of(self), touched, move);
  }
  return self;
}

at::Scalar local_scalar(const at::Tensor& self) {
  const c10::DeviceGuard on(self.device());
  auto value = std::make_shared<at::Scalar>();
  std::vector<Touched> touched;
  touch(touched, self, false);
  launch_and_wait("copy_d2h", "memcpy_d2h", "_local_scalar_dense", bytes_of(self), touched,
                  [from = host_alias(self), value] { *value = from.item(); });
  return *value;
}

// The plain formula: the CPU's fused kernel has other operators for its backward.
int64_t attention_choice(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
                         double, bool, std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", view);
  library.impl("_reshape_alias", reshape_alias);
  library.impl("unfold", unfold);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_source);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("resize_", resize);
  library.impl("copy_", copy);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_tensor);
  library.impl("_fused_sdp_choice", attention_choice);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute>()); }

}  // namespace

at::Tensor host_alias(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  void* data = tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
  return at::from_blob(data, tensor.sizes(), tensor.strides(),
                       at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
}

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

void touch(std::vector<Touched>& into, const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.numel() == 0) return;
  auto* block = block_of(tensor.storage().data_ptr());
  if (block == nullptr) return;
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride, size; expanded ones touch nothing more
  for (int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) > 1 && tensor.stride(i) > 0) dimensions.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dimensions.begin(), dimensions.end());
  Region region;
  region.begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  int64_t run = 1, rows = 1, stride = 0;  // in elements
  size_t next = 0;
  while (next < dimensions.size() && dimensions[next].first <= run) {
    run = (dimensions[next].second - 1) * dimensions[next].first + run;
    ++next;
  }
  if (next < dimensions.size()) {
    stride = dimensions[next].first;
    rows = dimensions[next].second;
    ++next;
    while (next < dimensions.size() && dimensions[next].first == stride * rows) rows *= dimensions[next++].second;
  }
  if (next < dimensions.size()) {  // more than rows of runs: the hull
    int64_t last = 0;
    for (const auto& [step, size] : dimensions) last += step * (size - 1);
    run = last + 1;
    rows = 1;
    stride = 0;
  }
  const auto item = tensor.element_size();
  region.row_bytes = static_cast<size_t>(run) * item;
  region.rows = static_cast<size_t>(rows);
  region.stride = static_cast<size_t>(stride) * item;
  into.push_back({&block->accesses, region, write});
}

void resize_storage(c10::StorageImpl* storage, size_t bytes, int device) {
  const c10::DeviceGuard on(given_or_current(Device(CUDA, static_cast<c10::DeviceIndex>(device))));
  auto fresh = device_allocator()->allocate(bytes);
  const auto kept = std::min(bytes, storage->nbytes());
  void *to = fresh.get(), *from = storage->mutable_data();
  if (kept > 0 && to != nullptr && from != nullptr) {
    const auto region = [kept](void* at) { return Region{reinterpret_cast<uintptr_t>(at), kept, 0, 1}; };
    std::vector<Touched> touched{{&block_of(fresh)->accesses, region(to), true}};
    if (auto* old = block_of(storage->data_ptr())) touched.push_back({&old->accesses, region(from), false});
    launch("copy", "copy_d2d", "resize", static_cast<int64_t>(kept), touched,
           [to, from, kept] { std::memcpy(to, from, kept); });
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

void prepare_worker() {
  at::set_num_threads(1);
  // Kept for the life of the thread, which has no end.
  [[maybe_unused]] static thread_local auto* no_grad = new at::NoGradGuard;
  [[maybe_unused]] static thread_local auto* below = new at::AutoDispatchBelowADInplaceOrView;
}

}  // namespace sim
