// Collectives of device tensors, without Python (docs/dev/measuring.md, R2 and R3).
//
// Calls of the backend are bracketed by marks, and return handles whose waits are recorded. Must not change an order;
// make the host wait for a device, unless the caller's own call does; touch a Python object on a collective's path
// (except once for each new stream).

#pragma once

#include <functional>

#include <c10/core/StreamGuard.h>

#include "step.hpp"

namespace aorta {

// Events that order streams, each in use while a caller may still wait for it.
class OrderEvents : public std::enable_shared_from_this<OrderEvents> {
 public:
  explicit OrderEvents(c10::DeviceType type) : type_(type) {}

  using Lent = std::shared_ptr<c10::Event>;

  Lent recorded(const c10::Stream& stream) {
    std::unique_ptr<c10::Event> event;
    {
      const std::lock_guard<std::mutex> held(mutex_);
      if (!free_.empty()) {
        event = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (!event) {
      event = std::make_unique<c10::Event>(type_);
    }
    event->record(stream);
    return {event.release(), [pool = shared_from_this()](c10::Event* gone) {
              const std::lock_guard<std::mutex> held(pool->mutex_);
              pool->free_.emplace_back(gone);
            }};
  }

 private:
  const c10::DeviceType type_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<c10::Event>> free_;
};

// Tensors that the backend released because we waited for it: kept until the caller waited or the device has passed.
struct Held {
  std::vector<c10::IValue> tensors;
  OrderEvents::Lent done;
};

class Device {
 public:
  // `priority`: of AORTA's streams beside the caller's stream.
  Device(std::shared_ptr<DeviceClock> clock, bool dedicated, bool dedicated_async, std::function<int()> priority)
      : dedicated(dedicated),
        dedicated_async(dedicated_async),
        clock_(std::move(clock)),
        priority_(std::move(priority)),
        guard_(clock_->device().type()),
        orders_(std::make_shared<OrderEvents>(clock_->device().type())),
        compute_(clock_->current()) {}

  const bool dedicated;
  const bool dedicated_async;

  const std::shared_ptr<DeviceClock>& clock() const { return clock_; }
  c10::Stream current() const { return clock_->current(); }
  bool computes() const { return current() == compute_; }

  void begin() {
    compute_ = current();
    let_go();
  }

  // AORTA's stream for `key` beside the caller's; none where the device hands out a stream a second time.
  std::optional<c10::Stream> side(const std::string& key) {
    const c10::Stream caller = current();
    std::unique_lock<std::mutex> held(mutex_);
    auto known = priorities_.find(caller.id());
    if (known == priorities_.end()) {
      held.unlock();  // Python is asked
      const int priority = priority_();
      held.lock();
      known = priorities_.emplace(caller.id(), priority).first;
    }
    const std::pair named(key, known->second);
    if (const auto side = sides_.find(named); side != sides_.end()) {
      return side->second;
    }
    const std::optional<c10::Stream> fresh = guard_.getNewStream(clock_->device(), known->second);
    bool taken = *fresh == compute_ || *fresh == caller;
    for (const auto& [_, other] : sides_) {
      taken = taken || other == fresh;
    }
    return sides_.emplace(named, taken ? std::nullopt : fresh).first->second;
  }

  // An event after everything on a stream so far.
  OrderEvents::Lent done(const c10::Stream& stream) { return orders_->recorded(stream); }

  // Runs what makes the caller's stream wait for a collective, unless that returns false: recorded if it is the compute
  // stream; otherwise the stream goes on after the collective.
  template <class Wait>
  void stalling(Step& step, const Name& of, const Wait& wait) {
    const bool computing = computes(), recorded = computing && step.is_open();
    const Mark begin = recorded ? clock_->mark() : NO_MARK;
    if (!wait()) {
      clock_->release(begin);
    } else if (recorded) {
      step.wait(of, flag::BLOCKED | flag::OVER, begin, clock_->mark());
    } else if (!computing) {
      const std::lock_guard<std::mutex> held(mutex_);
      auto& behind = joined_[current().id()];
      behind.push_back(of);
      if (behind.size() > MOST_JOINED) {
        behind.pop_front();
      }
    }
  }

  // The collectives that a stream has joined since the last call (`device_streams.py`).
  std::deque<Name> take_joined(c10::StreamId stream) {
    const std::lock_guard<std::mutex> held(mutex_);
    return std::exchange(joined_[stream], {});
  }

  std::shared_ptr<Held> hold(std::vector<c10::IValue> tensors, OrderEvents::Lent done) {
    auto held = std::make_shared<Held>(Held{std::move(tensors), std::move(done)});
    {
      const std::lock_guard<std::mutex> locked(mutex_);
      held_.push_back(held);
    }
    let_go();
    return held;
  }

  // The caller's stream continues after the collective, as with the backend's own wait.
  void let_go(Held& held) {
    std::vector<c10::IValue> gone;  // freed after the lock is released
    const std::lock_guard<std::mutex> locked(mutex_);
    gone.swap(held.tensors);
  }

 private:
  static constexpr size_t MOST_JOINED = 256;  // of streams that nobody asks about

  void let_go() {
    if (is_capturing(current())) {
      return;  // a capture forbids to ask for an event
    }
    while (true) {
      std::vector<c10::IValue> gone;
      const std::lock_guard<std::mutex> locked(mutex_);
      if (held_.empty() || !(held_.front()->tensors.empty() || held_.front()->done->query())) {
        return;
      }
      gone.swap(held_.front()->tensors);
      held_.pop_front();
    }
  }

  const std::shared_ptr<DeviceClock> clock_;
  const std::function<int()> priority_;
  const c10::impl::VirtualGuardImpl guard_;
  const std::shared_ptr<OrderEvents> orders_;
  c10::Stream compute_;
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, std::optional<c10::Stream>> sides_;
  std::map<c10::StreamId, int> priorities_;
  std::map<c10::StreamId, std::deque<Name>> joined_;
  std::deque<std::shared_ptr<Held>> held_;
};

// Handle of a collective that was issued synchronously on AORTA's stream: what the backend's own would have been. Its
// future records its event on the current stream.
class IssuedWork final : public Work {
 public:
  IssuedWork(OrderEvents::Lent done, std::vector<at::Tensor> outputs, c10::Device device)
      : done_(std::move(done)),
        outputs_(std::move(outputs)),
        future_(c10::make_intrusive<Future>(
            c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device})) {
    future_->markCompleted(c10::IValue(outputs_));
  }

  // On the host, with a limit; without one there is nothing to wait for: see `DeviceWork::wait`.
  bool wait(std::chrono::milliseconds timeout) override {
    if (timeout == kNoTimeout) {
      return true;
    }
    const auto limit = std::chrono::steady_clock::now() + timeout;
    while (!done_->query()) {
      TORCH_CHECK_WITH(
          DistBackendError,
          std::chrono::steady_clock::now() < limit,
          "a collective on AORTA's stream timed out in a blocking wait");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    done_->synchronize();  // returns at once; what the host does next is ordered behind it
    return true;
  }
  bool isCompleted() override { return done_->query(); }
  bool isSuccess() const override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<Future> getFuture() override { return future_; }

 private:
  const OrderEvents::Lent done_;
  const std::vector<at::Tensor> outputs_;
  const c10::intrusive_ptr<Future> future_;
};

// The backend's work on a device. It waits for `done`, or, without that, for the backend's work; either orders streams, so
// every stream that waits needs it.
class DeviceWork final : public WrappedWork {
 public:
  DeviceWork(
      c10::intrusive_ptr<Work> work,
      std::shared_ptr<Step> step,
      const Name& of,
      std::shared_ptr<Device> device,
      OrderEvents::Lent done,
      std::shared_ptr<Held> held)
      : WrappedWork(std::move(work), std::move(step), of),
        device_(std::move(device)),
        done_(std::move(done)),
        held_(std::move(held)) {}

  bool wait(std::chrono::milliseconds timeout) override {
    bool answer = true;
    Own own(*step_);
    const auto waits = [&] {
      answer = own.without([&] { return work_->wait(timeout); });
      return true;
    };
    if (done_ && timeout != kNoTimeout) {
      waits();  // the host waits, and may get an error
    }
    device_->stalling(*step_, of_, [&] {
      if (!done_) {
        return waits();
      }
      done_->block(device_->current());
      return true;
    });
    if (held_) {
      device_->let_go(*held_);
    }
    return answer;
  }

  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }

 private:
  const std::shared_ptr<Device> device_;
  const OrderEvents::Lent done_;
  const std::shared_ptr<Held> held_;
};

}  // namespace aorta
