// When blocks computed and a backward pass ended, marked without Python, on the host's clock or a device's.
//
// The same as `aorta/instrument/compute_ranges.py` (docs/dev/measuring.md, R5): the hooks of `hooks.hpp` report here, and
// block passes and ends of backward passes become rows. Must not touch a Python object.

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

class Ranges : public std::enable_shared_from_this<Ranges> {
 public:
  explicit Ranges(std::shared_ptr<Step> step) : step_(std::move(step)) {}

  void begin() {
    const std::lock_guard<std::mutex> held(mutex_);
    if (open_) {
      forget();
    }
    open_ = true;
  }

  // Stop recording; what is open has no end.
  void end() {
    const std::lock_guard<std::mutex> held(mutex_);
    open_ = false;
    forget();
  }

  // Observe from here on, in steps that are observed, until `ignore`; hooks already in a graph count too.
  void look() { looking_.store(true, std::memory_order_release); }
  void ignore() { looking_.store(false, std::memory_order_release); }

  Step& step() const { return *step_; }

  bool looks() const { return looking_.load(std::memory_order_acquire) && step_->observes(); }

  // `name`: its number in the ring.
  size_t add_block(uint16_t name) {
    const std::lock_guard<std::mutex> held(mutex_);
    blocks_.push_back({name});
    return blocks_.size() - 1;
  }

  void begin_forward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded()) {
      blocks_[block].forward.push_back(opened(blocks_[block], false));
    }
  }

  void end_forward(size_t block, int64_t at_ns) {
    const std::lock_guard<std::mutex> held(mutex_);
    auto& passes = blocks_[block].forward;
    if (!passes.empty()) {
      step_->end_span(passes.back(), at_ns);
      passes.pop_back();
    }
  }

  void begin_backward(size_t block) {
    const std::lock_guard<std::mutex> held(mutex_);
    if (recorded() && !blocks_[block].backward) {
      blocks_[block].backward = opened(blocks_[block], true);
    }
  }

  void end_backward(size_t block, int64_t at_ns) {
    const std::lock_guard<std::mutex> held(mutex_);
    close_backward(blocks_[block], at_ns);
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
    const Own own(*step_);
    int64_t begin = 0;
    {
      const std::lock_guard<std::mutex> held(mutex_);
      for (auto& block : blocks_) {
        close_backward(block, own.since_ns());
      }
      begin = moment();
    }
    when_backward_ends([self = shared_from_this(), begin] {
      const Own own(*self->step_);
      int64_t end = 0;
      {
        const std::lock_guard<std::mutex> held(self->mutex_);
        end = self->moment();
        if (self->open_) {
          self->step_->append({Kind::TAIL}, begin, end);
        } else {
          self->step_->drop(begin, end);
        }
      }
      self->step_->settle(self->step_->marks() ? now_ns() : end);
      self->step_->add_watched(-1);
    });
  }

  bool recorded() const { return open_ && looks(); }

  // Rows of its passes that are open.
  struct Block {
    uint16_t name;
    std::optional<int64_t> backward;
    std::vector<int64_t> forward;
  };

  int64_t opened(const Block& block, bool backward) {
    return step_->begin_span({Kind::PASS, backward ? flag::BACKWARD : uint8_t{0}, 0, 0, 0, block.name}, now_ns());
  }

  void close_backward(Block& block, int64_t at_ns) {
    if (block.backward) {
      step_->end_span(*block.backward, at_ns);
      block.backward.reset();
    }
  }

  // None of the device outside of steps.
  int64_t moment() const { return step_->marks() && !open_ ? NO_MARK : step_->moment(); }

  void forget() {
    for (auto& block : blocks_) {
      block.forward.clear();
      block.backward.reset();
    }
  }

  const std::shared_ptr<Step> step_;
  std::atomic<bool> looking_{false};
  std::atomic<int> asked_in_{-1};
  std::mutex mutex_;
  bool open_ = false;
  std::vector<Block> blocks_;
};

}  // namespace aorta
