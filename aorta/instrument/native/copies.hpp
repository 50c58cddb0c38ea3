// Copies of a step between host and device, between devices and within one, marked where the dispatcher sees them.
//
// What counts as a copy: docs/metrics.md. Must not change an order, make the host wait for a device, touch a Python
// object, or be on the path of a collective.

#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <ATen/ops/copy_ops.h>
#include <c10/core/TensorOptions.h>
#include <torch/library.h>

#include "device.hpp"

namespace aorta {

// From where to where a copy moved bytes; numbers as `ring_file.DIRECTIONS` has them.
enum class Direction : uint8_t { H2D = 0, D2H = 1, D2D = 2, P2P = 3 };

class Copies {
 public:
  Copies(std::shared_ptr<Device> device, std::shared_ptr<Step> step)
      : device_(std::move(device)),
        step_(std::move(step)),
        own_(device_->clock()->device()),
        memory_(c10::toBackendComponent(c10::computeDispatchKey(std::nullopt, std::nullopt, own_))) {}

  // Runs `original`, the copy of `from` into `into` (none: into a value of the host), between two marks if it is one.
  template <class Original>
  decltype(auto) timed(const at::Tensor& from, const at::Tensor* into, const Original& original) {
    const std::optional<Direction> direction = step_->is_open() ? direction_of(from, into) : std::nullopt;
    if (!direction || is_capturing(device_->current())) {
      return original();
    }
    const auto index = from.device().type() == own_.type() ? from.device().index() : into->device().index();
    Own own(*step_);
    // It is issued on the current stream of its source's device; no mark can be taken on a device not this rank's.
    const bool here = index == own_.index();
    const uint8_t computes = here && device_->computes() ? flag::COMPUTES : 0;
    Row row{Kind::COPY, static_cast<uint8_t>(static_cast<uint8_t>(*direction) | computes)};
    row.x = bytes_of(from, into);
    const Mark begin = marked(here);
    const struct Ends {
      ~Ends() {
        const Mark end = copies.marked(here);
        row.flags |= end == NO_MARK ? flag::ELSEWHERE : 0;
        copies.step_->append(row, begin, end);
      }
      Copies& copies;
      Row& row;
      Mark begin;
      bool here;
    } ends{*this, row, begin, here};
    return own.without(original);
  }

 private:
  Mark marked(bool here) const { return here ? device_->clock()->mark() : NO_MARK; }

  bool on_device(const at::Tensor& tensor) const {
    // By its keys: a tensor that only pretends to be on a device has no memory there.
    return tensor.device().type() == own_.type() && tensor.key_set().has_backend(memory_);
  }

  std::optional<Direction> direction_of(const at::Tensor& from, const at::Tensor* into) const {
    if (!from.defined() || (into != nullptr && !into->defined())) {
      return std::nullopt;
    }
    const bool there = on_device(from), here = into != nullptr && on_device(*into);
    if (bytes_of(from, into) == 0 || !(there || here)) {
      return std::nullopt;
    }
    if (there && here) {
      if (from.device() != into->device()) {
        return Direction::P2P;
      }
      return moves_bytes_only(from, *into) ? std::optional(Direction::D2D) : std::nullopt;
    }
    const bool with_host = into == nullptr || (there ? *into : from).is_cpu();
    return !with_host ? std::nullopt : std::optional(there ? Direction::D2H : Direction::H2D);
  }

  // Else a kernel converts or rearranges, which is computation (ATen/native/cuda/Copy.cu, `memcpy_eligible`).
  static bool moves_bytes_only(const at::Tensor& from, const at::Tensor& into) {
    return from.dtype() == into.dtype() && from.is_conj() == into.is_conj() && from.is_neg() == into.is_neg() &&
           from.layout() == c10::kStrided && into.layout() == c10::kStrided && from.sizes() == into.sizes() &&
           !from.is_same(into) &&
           ((from.is_contiguous() && into.is_contiguous()) ||
            (from.strides() == into.strides() && from.is_non_overlapping_and_dense()));
  }

  static int64_t bytes_of(const at::Tensor& from, const at::Tensor* into) {
    const at::Tensor& moved = into == nullptr ? from : *into;
    return moved.layout() == c10::kStrided ? moved.numel() * static_cast<int64_t>(moved.element_size()) : 0;
  }

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<Step> step_;
  const c10::Device own_;
  const c10::BackendComponent memory_;
};

constexpr c10::DispatchKeySet AFTER_BACKEND_SELECT(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::BackendSelect);

// Who looks at copies: the last one that began to. The kernels below stay in the dispatcher for the life of the process,
// since to remove one while another thread is about to call it would free what it calls.
class CopyWatchers {
 public:
  static CopyWatchers& all() {
    static auto* watchers = new CopyWatchers;  // leaked: threads that copy outlive static destructors
    return *watchers;
  }

  template <class Change>
  void change(const Change& change_of) {
    const std::lock_guard<std::mutex> held(mutex_);
    change_of(watching_);
    any_.store(!watching_.empty(), std::memory_order_release);
  }

  std::shared_ptr<Copies> last() {
    if (!any_.load(std::memory_order_acquire)) {
      return nullptr;
    }
    const std::lock_guard<std::mutex> held(mutex_);
    return watching_.empty() ? nullptr : watching_.back();
  }

 private:
  std::mutex mutex_;
  std::vector<std::shared_ptr<Copies>> watching_;
  std::atomic<bool> any_{false};
};

inline at::Tensor& watched_copy(
    c10::DispatchKeySet keys, at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const auto original = [&]() -> at::Tensor& {
    return at::_ops::copy_::redispatch(keys & AFTER_BACKEND_SELECT, self, source, non_blocking);
  };
  const auto copies = CopyWatchers::all().last();
  return copies ? copies->timed(source, &self, original) : original();
}

// `item()`: a value for the host, which waits for it.
inline at::Scalar watched_scalar(c10::DispatchKeySet keys, const at::Tensor& self) {
  const auto original = [&] { return at::_ops::_local_scalar_dense::redispatch(keys & AFTER_BACKEND_SELECT, self); };
  const auto copies = CopyWatchers::all().last();
  return copies ? copies->timed(self, nullptr, original) : original();
}

// Copies are marked for as long as what this returns lives.
inline std::shared_ptr<Copies> watch_copies(const std::shared_ptr<Device>& device, const std::shared_ptr<Step>& step) {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* library =
        new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::BackendSelect, __FILE__, __LINE__);
    library->impl("copy_", TORCH_FN(watched_copy));
    library->impl("_local_scalar_dense", TORCH_FN(watched_scalar));
  });
  const auto copies = std::make_shared<Copies>(device, step);
  CopyWatchers::all().change([&](auto& watching) { watching.push_back(copies); });
  return {copies.get(), [copies](Copies*) {
            CopyWatchers::all().change([&](auto& watching) { std::erase(watching, copies); });
          }};
}

}  // namespace aorta
