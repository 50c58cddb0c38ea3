// When a CPU backend's collective ended, stamped on the backend's own thread without Python's interpreter lock.
//
// A callback in Python has to get that lock first: the stamp is late by as long as another thread holds it, and the
// training thread pays for handing it over. Enters: a work handle. Leaves: a Stamp that is filled in when its future
// completes. Must not: touch a Python object from the backend's thread.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

// The clock of Python's time.perf_counter_ns() on Linux: CLOCK_MONOTONIC.
int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

using Future = c10::ivalue::Future;

struct Stamp {
  std::atomic<int64_t> end_ns{0};
  // Weak: the future holds the callback, which holds this.
  c10::weak_intrusive_ptr<Future> future;

  explicit Stamp(const c10::intrusive_ptr<Future>& future) : future(future) {}

  // A future wakes those who wait before it calls back, so it may have completed and not be stamped yet.
  bool done() const {
    if (end_ns.load(std::memory_order_acquire) != 0) {
      return true;
    }
    const auto alive = future.lock();
    return alive && alive->completed();
  }
};

std::shared_ptr<Stamp> on_completion(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto future = work->getFuture();
  auto stamp = std::make_shared<Stamp>(future);
  // uses_future=false: it is not looked at, so no stream is switched for the callback.
  future->addCallback(
      [stamp](Future&) { stamp->end_ns.store(now_ns(), std::memory_order_release); },
      /*uses_future=*/false);
  return stamp;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::class_<Stamp, std::shared_ptr<Stamp>>(module, "Stamp")
      .def_property_readonly("end_ns", [](const Stamp& stamp) { return stamp.end_ns.load(std::memory_order_acquire); })
      .def("done", &Stamp::done);
  module.def("on_completion", &on_completion);
}
