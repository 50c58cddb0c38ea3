// What torch asks a device type for: the guard (devices, streams, events) and the hooks (context, memory, generators).
//
// torch looks the hooks up by the name "CUDAHooks" while it is imported, so this library has to be there before.
#include "guard.hpp"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <array>

#include "memory.hpp"

namespace sim {
namespace {

// What a c10 event points to. The newest record is what is waited for and asked.
struct Event {
  std::mutex mutex;
  SharedMoment last;
  bool timing = false;
  SharedMoment get() {
    std::lock_guard<std::mutex> held(mutex);
    return last;
  }
};

SharedMoment last_of(void* event) { return event == nullptr ? nullptr : static_cast<Event*>(event)->get(); }

c10::Device device_of(int index) { return {CUDA, static_cast<c10::DeviceIndex>(index)}; }
int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Device exchangeDevice(c10::Device device) const override { return device_of(exchange_device(device.index())); }
  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }

  c10::Stream getStream(c10::Device device) const override { return as_c10(current_stream(index_of(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return as_c10(stream_of(index_of(device), 0)); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return as_c10(new_stream(index_of(device), high ? -1 : 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return as_c10(new_stream(index_of(device), priority));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = stream.device_index();
    return as_c10(stream_of(device, exchange_stream(device, stream.id())));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &from_c10(stream); }
  bool queryStream(const c10::Stream& stream) const override { return from_c10(stream).query(); }
  bool isStreamCapturing(const c10::Stream&) const override { return capturing() != nullptr; }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(from_c10(stream), "stream", /*by_operator=*/true);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    sim::synchronize_device(device < 0 ? current_device() : device, "device");
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device index ", int(device),
                " does not match recording stream's device index ", int(stream.device_index()), ".");
    if (*event == nullptr) {
      count("events_created");
      auto* made = new Event;
      made->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = made;
    }
    count("events_recorded");
    auto* into = static_cast<Event*>(*event);
    auto moment = from_c10(stream).record(into->timing);
    std::lock_guard<std::mutex> held(into->mutex);
    into->last = std::move(moment);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* event, const c10::Stream& stream) const override { from_c10(stream).wait(last_of(event)); }
  bool queryEvent(void* event) const override { return poll(last_of(event)); }
  void synchronizeEvent(void* event) const override {
    if (auto last = last_of(event)) synchronize_moment(last, "event", /*by_operator=*/false);
  }
  double elapsedTime(void* one, void* other, const c10::DeviceIndex) const override { return elapsed_ms(one, other); }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    sim::record_stream(pointer, from_c10(stream));
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

c10::Stream as_c10(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(stream.device), stream.id);
}

Stream& from_c10(const c10::Stream& stream) { return stream_of(index_of(stream.device()), stream.id()); }

double elapsed_ms(void* one, void* other) {
  TORCH_CHECK(one != nullptr && other != nullptr, "Both events must be recorded before calculating elapsed time.");
  auto *begin = static_cast<Event*>(one), *end = static_cast<Event*>(other);
  TORCH_CHECK(begin->timing && end->timing, "Both events must be created with argument 'enable_timing=True'.");
  const auto from = begin->get(), to = end->get();
  TORCH_CHECK(from->stream->device == to->stream->device, "CUDA error: invalid resource handle (events of devices ",
              from->stream->device, " and ", to->stream->device, ")");
  TORCH_CHECK(poll(from) && poll(to), "CUDA error: device not ready (an event that has not happened)");
  const double length_ns = static_cast<double>(to->at_ns() - from->at_ns());
  const double by_device_ns = length_ns * (1 + static_cast<double>(settings()->rate_ppm) / 1e6);
  // cudaEventElapsedTime answers in float32 milliseconds; who reads it has to live with that.
  return static_cast<double>(static_cast<float>(by_device_ns / 1e6));
}

int64_t event_ns(void* event) {
  const auto last = last_of(event);
  TORCH_CHECK(last != nullptr && poll(last), "the event has not happened");
  return last->at_ns();
}

at::Generator& generator_of(int device) {
  static auto* generators = new std::array<at::Generator, 8>;
  auto& found = generators->at(device < 0 ? current_device() : device);
  if (!found.defined()) found = at::make_generator<at::CPUGeneratorImpl>(c10::detail::getNonDeterministicRandom());
  return found;
}

// The runtime's own question, which torch 2.11's streams leave to their users; it takes a stream's native handle.
extern "C" int cudaStreamIsCapturing(void* handle, int* status) {
  count("capture_questions");
  const auto known = streams_of(-1);
  if (std::find(known.begin(), known.end(), handle) == known.end()) return 400;  // cudaErrorInvalidResourceHandle
  *status = capturing() != nullptr ? 1 : 0;
  return 0;
}

extern "C" int cudaThreadExchangeStreamCaptureMode(int* mode) {
  *mode = exchange_capture_mode(*mode);
  return 0;
}

}  // namespace sim

namespace at {  // where the registry's macro expects the class
namespace {

struct SimulatedHooks final : CUDAHooksInterface {
  explicit SimulatedHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(sim::device_count()); }
  int getNumGPUs() const override { return sim::device_count(); }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(sim::current_device()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex device) const override { sim::exchange_device(device); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return static_cast<DeviceIndex>(sim::exchange_device(device));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return sim::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return sim::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return sim::device_allocator(); }
  Device getDeviceFromPtr(void*) const override { return {c10::DeviceType::CUDA, current_device()}; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override { return sim::generator_of(device); }
  Generator getNewGenerator(DeviceIndex) const override { return make_generator<CPUGeneratorImpl>(); }
  void deviceSynchronize(DeviceIndex device) const override { sim::synchronize_device(device, "device"); }
};
using c10::Registry;  // the macro names it without its namespace
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, SimulatedHooks)

}  // namespace
}  // namespace at
