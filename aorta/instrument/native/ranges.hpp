// When blocks computed and a backward pass ended, marked without Python, on the host's clock or a device's.
//
// The same as `aorta/instrument/compute_ranges.py` and `compute_ranges.py` do (docs/dev/measuring.md, R5): the hooks of `hooks.hpp`
// report here, and a step's block passes and ends of backward passes come out. Must not touch a Python object.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "device_clock.hpp"
#include "step.hpp"

namespace aorta {

// One pass of one block, as marks; the end is 0 while it is open.
struct Pass {
  size_t block;
  bool backward;
  int64_t start;
  int64_t end;
};

// Of one step on a device, in the order in which they began; `tails` is the strategy's work at the end of backward passes.
struct Passes {
  std::vector<Pass> all;
  Stretches tails;
};

class Ranges : public std::enable_shared_from_this<Ranges> {
 public:
  // `clock`: the device's; none on a CPU, where passes are rows of the step's ring.
  Ranges(std::shared_ptr<Step> step, std::shared_ptr<DeviceClock> clock)
      : step_(std::move(step)), clock_(std::move(clock)) {}

  void begin() {
    const std::lock_guard<std::mutex> held(mutex_);
    forget();
    open_ = true;
  }

  // Stop recording; returns the events since `begin`.
  std::unique_ptr<Passes> end() {
    const std::lock_guard<std::mutex> held(mutex_);
    open_ = false;
    auto taken = std::make_unique<Passes>(Passes{std::exchange(passes_, {}), std::exchange(tails_, {})});
    forget();
    return taken;
  }

  // Observe from here on, until `ignore`; hooks already in a graph count too.
  void look() { looking_.store(true, std::memory_order_release); }
  void ignore() { looking_.store(false, std::memory_order_release); }

  Step& step() const { return *step_; }

  bool looks() const { return looking_.load(std::memory_order_acquire); }

  // `name`: its number in the ring.
  size_t add_block(uint16_t name) {
    const std::lock_guard<std::mutex> held(mutex_);
    names_.push_back(name);
    forward_.emplace_back();
    backward_.emplace_back();
    return forward_.size() - 1;
  }

  void begin_forward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded()) {
      forward_[block].push_back(opened(block, false));
    }
  }

  void end_forward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (!forward_[block].empty()) {
      close(forward_[block].back());
      forward_[block].pop_back();
    }
  }

  void begin_backward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded() && !backward_[block]) {
      backward_[block] = opened(block, true);
    }
  }

  void end_backward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    close_backward(backward_[block]);
  }

  // A gradient reached a module whose backward passes are watched: queue a callback of the engine after the last node,
  // once per pass. Passes are compared by id: one that failed never ends, and must not hide the next one.
  void gradient_came() {
    const int pass = torch::autograd::get_current_graph_task_id();
    if (looks() && asked_in_.exchange(pass) != pass) {
      step_->add_watched(1);
      when_backward_ends([self = shared_from_this()] { self->nodes_ran(); });
    }
  }

 private:
  static void when_backward_ends(std::function<void()> callback) {
    torch::autograd::Engine::get_default_engine().queue_callback(std::move(callback));
  }

  // Runs before the strategy's own callback, which was queued later; queues a second one that runs after it.
  void nodes_ran() {
    const Own own(*step_, Part::BACKWARD);
    {
      const std::lock_guard<std::mutex> held(mutex_);
      for (auto& pass : backward_) {
        close_backward(pass);
      }
    }
    when_backward_ends([self = shared_from_this(), begin = moment()] {
      const Own own(*self->step_, Part::BACKWARD);
      const int64_t end = self->moment();
      {
        const std::lock_guard<std::mutex> held(self->mutex_);
        if (self->open_) {
          self->add_tail(begin, end);
        } else {
          self->release(begin);
          self->release(end);
        }
      }
      self->step_->settle(self->clock_ ? now_ns() : end);
      self->step_->add_watched(-1);
    });
  }

  bool recorded() const { return open_ && looks(); }

  int64_t opened(size_t block, bool backward) {
    if (Ring* ring = step_->ring().get()) {
      const uint8_t flags = backward ? flag::BACKWARD : 0;
      return ring->append({Kind::PASS, flags, 0, 0, 0, names_[block], now_ns()});
    }
    passes_.push_back({block, backward, clock_->mark(), 0});
    return static_cast<int64_t>(passes_.size()) - 1;
  }

  void close(int64_t pass) {
    if (Ring* ring = step_->ring().get()) {
      ring->end(pass, now_ns());
    } else {
      passes_[static_cast<size_t>(pass)].end = clock_->mark();
    }
  }

  void close_backward(std::optional<int64_t>& pass) {
    if (pass) {
      close(*pass);
      pass.reset();
    }
  }

  void add_tail(int64_t begin, int64_t end) {
    if (Ring* ring = step_->ring().get()) {
      ring->append({Kind::TAIL, 0, 0, 0, 0, 0, begin, end});
    } else {
      tails_.emplace_back(begin, end);
    }
  }

  int64_t moment() const { return clock_ ? clock_->mark() : now_ns(); }
  void release(int64_t mark) const {
    if (clock_) {
      clock_->release(mark);
    }
  }

  void forget() {
    for (const Pass& pass : passes_) {
      release(pass.start);
      release(pass.end);
    }
    for (const auto& [begin, end] : tails_) {
      release(begin);
      release(end);
    }
    passes_.clear();
    tails_.clear();
    for (auto& passes : forward_) {
      passes.clear();
    }
    for (auto& pass : backward_) {
      pass.reset();
    }
  }

  const std::shared_ptr<Step> step_;
  const std::shared_ptr<DeviceClock> clock_;
  std::atomic<bool> looking_{false};
  std::atomic<int> asked_in_{-1};
  std::mutex mutex_;
  bool open_ = false;
  std::vector<Pass> passes_;
  Stretches tails_;
  std::vector<uint16_t> names_;
  std::vector<std::vector<int64_t>> forward_;  // by block: those that are open, in `passes_` or the ring
  std::vector<std::optional<int64_t>> backward_;
};

}  // namespace aorta
