// The host's clock, and timestamps on an accelerator's own timeline: the same as `DeviceClock` in event_clock.py, without
// Python, and for runs of any length: the two clocks do not tick alike (7 ppm apart on an H200: 25 ms an hour), so that
// they are compared once a second, and what is measured from then on keeps to the host's.
//
// A mark is a number: positive for a time of the host's clock in nanoseconds, negative for a device event of the pool,
// 0 for none. Must not wait for the device's work, or touch a Python object.

#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>

#include <dlfcn.h>

#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace aorta {

// Replacement clock for tests in virtual time; null: the real clock.
inline int64_t (*other_clock)() = nullptr;

// The clock of Python's time.perf_counter_ns() on Linux: CLOCK_MONOTONIC.
inline int64_t now_ns() {
  if (other_clock != nullptr) {
    return other_clock();
  }
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

using Mark = int64_t;
constexpr Mark NO_MARK = 0;

// Streams report this since torch 2.12. The macro makes tests take the way of torch 2.11 with any torch.
template <class AnyStream>
#ifdef AORTA_CAPTURE_BY_RUNTIME
constexpr bool says_capturing = false;
#else
constexpr bool says_capturing = requires(const AnyStream& stream) { stream.is_capturing(); };
#endif

// A function of the CUDA or HIP runtime that torch has loaded, whose types are the same in both; null where there is none.
template <class Function>
Function of_runtime(const std::string& name) {
  void* const cuda = dlsym(RTLD_DEFAULT, ("cuda" + name).c_str());
  return reinterpret_cast<Function>(cuda ? cuda : dlsym(RTLD_DEFAULT, ("hip" + name).c_str()));
}

// It returns an error code; the status is 0 where nothing is captured.
using RuntimeIsCapturing = int (*)(void* stream, int* status);
inline RuntimeIsCapturing runtime_is_capturing() {
  static const auto found = of_runtime<RuntimeIsCapturing>("StreamIsCapturing");
  return found;
}

template <class AnyStream>
bool is_capturing(const AnyStream& stream) {
  if constexpr (says_capturing<AnyStream>) {
    return stream.is_capturing();
  } else {
    // An error means that another stream's capture forbids even this question: no event may be recorded either.
    int status = 0;
    return runtime_is_capturing()(stream.native_handle(), &status) != 0 || status != 0;
  }
}

// Why `is_capturing` cannot be asked of the device's streams; none if it can. torch calls HIP devices CUDA, too.
inline std::optional<std::string> why_not_served(c10::Device device) {
  if (!says_capturing<c10::Stream> && !(device.is_cuda() && runtime_is_capturing())) {
    return "neither its streams nor a CUDA or HIP runtime say whether they are being captured";
  }
  try {
    is_capturing(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    return std::nullopt;
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
}

class DeviceClock {
 public:
  explicit DeviceClock(c10::Device device) : device_(device), guard_(device.type()) {
    const Placed origin = placed();
    origin_bound_ns_ = origin.bound_ns;
    epochs_.push_back({origin.slot, 0, Start{origin.at_ns, 0, 0.0}});
    met_ = first_met_ = {0, origin.at_ns - origin.bound_ns - EVENT_NS, origin.at_ns + origin.bound_ns + EVENT_NS};
    compared_at_ns_ = origin.at_ns;
  }

  c10::Stream current() const { return guard_.getStream(device_); }
  c10::Device device() const { return device_; }

  Mark mark() {
    const c10::Stream stream = current();
    if (is_capturing(stream)) {
      return NO_MARK;
    }
    const int64_t sent_ns = now_ns();
    const std::lock_guard<std::mutex> held(mutex_);
    const size_t slot = recorded(stream);
    slots_[slot].sent_ns = sent_ns;
    slots_[slot].epoch = first_epoch_ + epochs_.size() - 1;
    ++epochs_.back().marks;
    return -static_cast<Mark>(slot) - 1;
  }

  void new_epoch() {
    const c10::Stream stream = current();
    if (is_capturing(stream)) {
      return;
    }
    const std::lock_guard<std::mutex> held(mutex_);
    if (now_ns() - compared_at_ns_ >= COMPARE_EVERY_NS) {
      compare();
    }
    epochs_.push_back({recorded(stream), 0, std::nullopt});
    forget_epochs();
  }

  std::optional<int64_t> read_ns(Mark mark) {
    if (mark >= 0) {
      return mark;
    }
    const std::lock_guard<std::mutex> held(mutex_);
    const Slot& slot = slot_of(mark);
    const size_t at = slot.epoch - first_epoch_;
    const std::optional<Start> start = start_of(at);
    if (!start || !slot.event.query()) {
      return std::nullopt;
    }
    return start->host_ns_after(elapsed_ns(epochs_[at].slot, slot));
  }

  // Whether the device has passed a mark, also where it is not known when.
  bool passed(Mark mark) {
    const std::lock_guard<std::mutex> held(mutex_);
    return slot_of(mark).event.query();
  }

  // Make the device that of the calling thread: the first call of a runtime by a thread takes memory of its device.
  void use_here() const { guard_.setDevice(device_); }

  // When the host recorded it; none for a time of the host's clock.
  std::optional<int64_t> sent_ns(Mark mark) {
    if (mark >= 0) {
      return std::nullopt;
    }
    const std::lock_guard<std::mutex> held(mutex_);
    return slot_of(mark).sent_ns;
  }

  c10::StreamId stream_of(Mark mark) {
    const std::lock_guard<std::mutex> held(mutex_);
    return slot_of(mark).stream;
  }

  int64_t bound_ns() const { return origin_bound_ns_; }

  void release(Mark mark) {
    if (mark >= 0) {
      return;
    }
    const std::lock_guard<std::mutex> held(mutex_);
    --epochs_[slot_of(mark).epoch - first_epoch_].marks;
    free_.push_back(static_cast<size_t>(-mark - 1));
    forget_epochs();
  }

  // Error bounds at the start and now, and the drift between the two clocks. The device must be idle.
  std::tuple<int64_t, int64_t, std::optional<int64_t>> facts() {
    const std::lock_guard<std::mutex> held(mutex_);
    epochs_.push_back({recorded(current()), 0, std::nullopt});  // it has happened too when `placed` returns
    const Placed again = placed();
    std::optional<int64_t> drift_ns;
    if (const auto start = start_of(epochs_.size() - 1)) {
      drift_ns = start->host_ns_after(elapsed_ns(epochs_.back().slot, slots_[again.slot])) - again.at_ns;
    }
    free_.push_back(again.slot);
    return {origin_bound_ns_, again.bound_ns, drift_ns};
  }

  size_t events() {
    const std::lock_guard<std::mutex> held(mutex_);
    return slots_.size();
  }

 private:
  static constexpr int BRACKETS = 20;
  static constexpr int64_t EVENT_NS = 1'000;  // what the times of two events may be off by, together
  static constexpr int64_t COMPARE_EVERY_NS = 1'000'000'000;
  static constexpr int64_t COMPARE_FOR_NS = 50'000;  // an idle stream reaches an event within some 10 us
  static constexpr int64_t RATE_OVER_NS = 60'000'000'000;  // temperature and NTP change the rate in minutes
  static constexpr double FASTEST = 1e-4;  // a difference is made up for at 100 us a second, so that time never runs back

  struct Slot {
    c10::Event event;
    size_t epoch;
    int64_t sent_ns;
    c10::StreamId stream;
  };

  // When an epoch began, on both clocks, and how much faster the host's time passes in it, as a share.
  struct Start {
    int64_t host_ns;
    int64_t device_ns;  // since the origin, by the device's own time
    double rate;

    int64_t host_ns_after(int64_t device_ns) const {
      return host_ns + device_ns + std::llrint(rate * static_cast<double>(device_ns));
    }
  };

  struct Epoch {
    size_t slot;
    int64_t marks;  // unreleased marks that are measured from it
    std::optional<Start> start;
  };

  // What the host's clock showed, at least and at most, at one time of the device.
  struct Meeting {
    int64_t device_ns;
    int64_t earliest_ns;
    int64_t latest_ns;
  };

  struct Placed {
    size_t slot;
    int64_t at_ns;
    int64_t bound_ns;
  };

  // The narrowest of several short brackets of host clock readings around an event: see `event_clock.anchor_event`.
  Placed placed() {
    std::optional<Placed> best;
    for (int i = 0; i < BRACKETS; ++i) {
      const c10::Stream stream = current();
      const int64_t before_ns = now_ns();
      const size_t slot = recorded(stream);
      while (!slots_[slot].event.query()) {
      }
      const int64_t after_ns = now_ns();
      const Placed placed{slot, before_ns + (after_ns - before_ns) / 2, (after_ns - before_ns + 1) / 2};
      const bool is_best = !best || placed.bound_ns < best->bound_ns;
      if (best) {
        free_.push_back(is_best ? best->slot : slot);
      }
      best = is_best ? placed : best;
    }
    return *best;
  }

  Slot& slot_of(Mark mark) { return slots_[static_cast<size_t>(-mark - 1)]; }

  size_t recorded(const c10::Stream& stream) {
    if (free_.empty()) {
      slots_.push_back({c10::Event(device_.type(), c10::EventFlag::BACKEND_DEFAULT), 0, 0, 0});
      free_.push_back(slots_.size() - 1);
    }
    const size_t slot = free_.front();
    free_.pop_front();
    slots_[slot].event.record(stream);
    slots_[slot].stream = stream.id();
    return slot;
  }

  // `elapsedTime` answers in float32 milliseconds, on every accelerator so far.
  int64_t elapsed_ns(size_t from, const Slot& to) {
    return std::llrint(slots_[from].event.elapsedTime(to.event) * 1e6);
  }

  // When the epoch at this index in `epochs_` began; resolves the epochs before it on the way.
  std::optional<Start> start_of(size_t at) {
    size_t known = at;
    while (!epochs_[known].start) {
      --known;  // the first one's is always known
    }
    for (; known < at; ++known) {
      Epoch& next = epochs_[known + 1];
      if (!slots_[next.slot].event.query()) {
        return std::nullopt;
      }
      const Start& start = *epochs_[known].start;
      const int64_t length_ns = elapsed_ns(epochs_[known].slot, slots_[next.slot]);
      next.start = {start.host_ns_after(length_ns), start.device_ns + length_ns, 0.0};
      next.start->rate = rate_from(*next.start);
    }
    return epochs_[at].start;
  }

  // The rate that leads from here to where the last comparison says that the host's clock is: no more than is needed.
  double rate_from(const Start& start) const {
    const int64_t since_ns = start.device_ns - met_.device_ns;
    const int64_t drifted_ns = since_ns + std::llrint(rate_ * static_cast<double>(since_ns));
    const int64_t nearest_ns =
        std::clamp(start.host_ns, met_.earliest_ns + drifted_ns, met_.latest_ns + drifted_ns);
    return rate_ + std::clamp(static_cast<double>(nearest_ns - start.host_ns) / 1e9, -FASTEST, FASTEST);
  }

  // Compare the clocks by an event of a stream that does nothing else, between two readings of the host's. Where it does
  // not come at once (its hardware queue is shared, or other processes have their turn), the next comparison may.
  void compare() {
    size_t known = 0;
    while (known + 1 < epochs_.size() && start_of(known + 1)) {
      ++known;
    }
    if (!idle_) {
      idle_ = guard_.getStreamFromGlobalPool(device_, /*isHighPriority=*/true);
    }
    const int64_t before_ns = now_ns();
    compared_at_ns_ = before_ns;
    const size_t slot = recorded(*idle_);
    free_.push_back(slot);
    bool reached = slots_[slot].event.query();
    while (!reached && now_ns() - before_ns < COMPARE_FOR_NS) {
      reached = slots_[slot].event.query();
    }
    const int64_t after_ns = now_ns();
    if (!reached) {
      return;
    }
    const int64_t device_ns = epochs_[known].start->device_ns + elapsed_ns(epochs_[known].slot, slots_[slot]);
    const Meeting found{device_ns, before_ns - EVENT_NS, after_ns + EVENT_NS};
    const double span_ns = static_cast<double>(found.device_ns - first_met_.device_ns);
    if (span_ns > 0) {
      const double least = static_cast<double>(found.earliest_ns - first_met_.latest_ns) / span_ns - 1;
      const double most = static_cast<double>(found.latest_ns - first_met_.earliest_ns) / span_ns - 1;
      rate_ = std::clamp(rate_, least, most);
    }
    if (span_ns > RATE_OVER_NS) {
      first_met_ = met_;
    }
    met_ = found;
  }

  // No mark refers to the oldest any more, and the time of the next one is known.
  void forget_epochs() {
    while (epochs_.size() > 1 && epochs_.front().marks == 0 && epochs_[1].start) {
      free_.push_back(epochs_.front().slot);
      epochs_.pop_front();
      ++first_epoch_;
    }
  }

  const c10::Device device_;
  const c10::impl::VirtualGuardImpl guard_;
  std::mutex mutex_;
  std::deque<Slot> slots_;  // a deque: addresses of its elements are stable
  std::deque<size_t> free_;
  std::deque<Epoch> epochs_;
  size_t first_epoch_ = 0;
  int64_t origin_bound_ns_ = 0;
  std::optional<c10::Stream> idle_;  // does nothing but comparisons
  Meeting met_{}, first_met_{};      // the last one, and one up to two minutes before, by which the rate is known
  int64_t compared_at_ns_ = 0;
  double rate_ = 0;  // how much faster the host's time passes, as a share
};

}  // namespace aorta
