// State of collectives while a step runs: when each ended, and who waited for it when.
//
// Times come from any thread, and a step's rows, waits and long calls come out. Must not touch a Python object; wait for a
// backend's work more than once, or unless the caller does.

#pragma once

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "marks.hpp"

namespace aorta {

using c10d::Work;
using Future = c10::ivalue::Future;

// Whether a backward pass runs on this thread: DDP takes futures in one, and waits for them at its end.
inline bool in_backward() { return torch::autograd::get_current_graph_task_id() != -1; }

// When a collective ended, and what reported it first: the backend's future, or its caller's wait.
class End {
 public:
  enum Source : int64_t { FUTURE = 0, WAIT = 1 };

  // `row`: of its collective.
  End(std::shared_ptr<Ring> ring, int64_t row) : ring_(std::move(ring)), row_(row) {}

  void stamp(Source source, int64_t at_ns = now_ns()) {
    int64_t unknown = 0;
    // In one word, so that time and source are read together.
    if (both_.compare_exchange_strong(unknown, at_ns * 2 + source, std::memory_order_acq_rel)) {
      ring_->complete(row_, at_ns * 2 + source);
    }
  }
  // Twice the time, with the source in the lowest bit; 0 until it is known.
  int64_t both() const { return both_.load(std::memory_order_acquire); }

  // Polled by `settle` until its callback has run.
  void watch(const c10::intrusive_ptr<Future>& future) {
    const std::lock_guard<std::mutex> held(mutex_);
    future_ = c10::weak_intrusive_ptr<Future>(future);
  }

  // The future's callback. The future is released here: even a weak reference keeps its value, the tensors, alive.
  void called_back() {
    stamp(FUTURE);
    const std::lock_guard<std::mutex> held(mutex_);
    future_.reset();
  }

  // A future wakes waiting threads before it runs callbacks: one that is over was so by `at_ns`.
  void settle(int64_t at_ns) {
    c10::intrusive_ptr<Future> alive;  // released after the lock
    {
      const std::lock_guard<std::mutex> held(mutex_);
      alive = future_.lock();
    }
    if (alive && alive->completed()) {
      stamp(FUTURE, at_ns);
    }
  }

 private:
  std::atomic<int64_t> both_{0};
  const std::shared_ptr<Ring> ring_;
  const int64_t row_;
  std::mutex mutex_;
  c10::weak_intrusive_ptr<Future> future_{c10::intrusive_ptr<Future>()};
};

// A collective as rows name it, operator and group by their numbers; and its own row, none of one on a device outside of
// steps.
struct Name {
  uint8_t op;
  uint16_t group;
  int64_t seq;
  int64_t row;
};

struct Collective {
  Name name;
  int64_t issue_ns;
  std::shared_ptr<End> end;    // of one on the host
  std::shared_ptr<Span> span;  // of one on a device
};

// What a finished step leaves beside its rows: how many collectives it had, how many rows the ring until then, and AORTA's
// own time.
struct Noted {
  size_t count = 0;
  int64_t rows = 0;
  int64_t own_ns = 0;
};

// The events of one step, and from its end on those of the next one, as rows of the ring. Written from any thread.
class Step {
 public:
  // `marks`: of a device, none on a CPU.
  Step(std::shared_ptr<Ring> ring, std::shared_ptr<Marks> marks) : ring_(std::move(ring)), marks_(std::move(marks)) {}

  Ring& ring() const { return *ring_; }
  const std::shared_ptr<Marks>& marks() const { return marks_; }

  // Begin a step on the thread that trains. Returns the events since the last one, unless the step `continues` it:
  // then they are its own. Of one that is not `observed` nothing is recorded.
  Noted begin(bool continues, bool observed) {
    const std::lock_guard<std::mutex> held(mutex_);
    open_ = observed;
    observes_.store(observed, std::memory_order_relaxed);
    trains_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    return continues ? Noted{} : taken();
  }

  // End the step; unless it is `abandoned`, what is recorded from now on is part of the next one.
  Noted end(bool abandoned) {
    const std::lock_guard<std::mutex> held(mutex_);
    open_ = open_ && !abandoned;
    return taken();
  }

  // How many collectives were recorded since the last step ended.
  size_t count() const {
    const std::lock_guard<std::mutex> held(mutex_);
    return count_;
  }

  bool is_open() const { return open_.load(std::memory_order_acquire); }

  // Whether the newest step is observed.
  bool observes() const { return observes_.load(std::memory_order_relaxed); }

  // AORTA's own time; on another thread than the one that trains, or runs its backward pass, it holds up nothing.
  void add_own(int64_t spent_ns) {
    if (std::this_thread::get_id() == trains_.load(std::memory_order_relaxed) || in_backward()) {
      own_ns_.fetch_add(spent_ns, std::memory_order_relaxed);
    }
  }

  // Numbered and recorded under one lock: rows are in the order in which they were issued. Outside of steps, too: for
  // whoever asks what a rank is stuck in.
  Collective issue(Row row, int64_t& count, bool on_device) {
    const std::lock_guard<std::mutex> held(mutex_);
    const bool open = open_;
    row.y = count++;
    row.a = now_ns();
    row.flags = watched_passes_ == 0 && in_backward() ? flag::UNWATCHED : 0;
    if (on_device) {
      row.flags |= flag::ON_DEVICE | (open ? 0 : flag::UNMARKED);
    }
    const int64_t index = ring_->issue(row);
    count_ += open;
    Collective issued{{row.op, row.group, row.y, open || !on_device ? index : Ring::NOWHERE}, row.a, nullptr, nullptr};
    if (on_device) {
      issued.span = std::make_shared<Span>(marks_, issued.name.row);
      return issued;
    }
    issued.end = std::make_shared<End>(ring_, index);
    if (open) {
      ends_.push_back(issued.end);
    }
    return issued;
  }

  // Backward passes that reached what is watched begin (1) or end (-1); one may run within another, of a checkpoint.
  void add_watched(int64_t passes) {
    const std::lock_guard<std::mutex> held(mutex_);
    watched_passes_ = std::max<int64_t>(watched_passes_ + passes, 0);
  }

  // How many calls of backends have begun and not returned: they may have counted their collectives or not.
  std::atomic<int64_t> underway{0};

  // Whether the thread that trains calls, between a step's begin and what abandons it: on another thread a call or a wait
  // holds up no computation.
  bool holds_up() const { return is_open() && std::this_thread::get_id() == trains_.load(std::memory_order_relaxed); }

  // Appends a row whose span begins at that time of the host, or with a mark of the device; its index.
  int64_t begin_span(Row row, int64_t at_ns) {
    row.a = marks_ ? 0 : at_ns;
    const int64_t index = ring_->append(row);
    if (marks_) {
      marks_->begin(index, marks_->clock().mark());
    }
    return index;
  }

  void end_span(int64_t index, int64_t at_ns) {
    if (!marks_) {
      ring_->end(index, at_ns);
    } else if (index != Ring::NOWHERE) {
      marks_->end(index, marks_->clock().mark());
    }
  }

  // A time of the host, or a mark of the device's current stream.
  int64_t moment() const { return marks_ ? marks_->clock().mark() : now_ns(); }

  // Appends a row of a step between two times of the host, or two marks; its index. Nothing outside of steps.
  int64_t append(Row row, int64_t begin, int64_t end) {
    if (!is_open()) {
      drop(begin, end);
      return Ring::NOWHERE;
    }
    if (marks_) {
      return marks_->append(row, begin, end);
    }
    row.a = begin;
    row.b = end;
    return ring_->append(row);
  }

  // What is not recorded.
  void drop(int64_t begin, int64_t end) {
    if (marks_) {
      marks_->clock().release(begin);
      marks_->clock().release(end);
    }
  }

  // A wait for a collective, by the host or the stream that computes.
  void wait(const Name& of, int flags, int64_t begin, int64_t end) {
    append({Kind::WAIT, static_cast<uint8_t>(flags), of.op, 0, of.group, 0, 0, 0, 0, of.seq}, begin, end);
  }

  // Between these marks the compute stream may have waited for a stream of the strategy, and so for the collectives that
  // this one had joined.
  void wait_for_stream(Mark begin, Mark end, const std::vector<Name>& joined) {
    const int64_t index = append({Kind::GAP}, begin, end);
    for (const Name& name : joined) {
      ring_->append({Kind::JOINED, 0, name.op, 0, name.group, 0, 0, 0, index, name.seq});
    }
  }

  // The caller continued at `at_ns` because collectives were over: those that are ended by then.
  void settle(int64_t at_ns) {
    std::vector<std::shared_ptr<End>> open;
    {
      const std::lock_guard<std::mutex> held(mutex_);
      for (const auto& end : ends_) {
        if (end->both() == 0) {
          open.push_back(end);
        }
      }
    }
    for (const auto& end : open) {  // without the lock: what a future releases may wait for the interpreter
      end->settle(at_ns);
    }
  }

 private:
  Noted taken() {
    watched_passes_ = 0;  // one that failed has no end
    ends_.clear();
    return {std::exchange(count_, 0), ring_->count(), own_ns_.exchange(0, std::memory_order_relaxed)};
  }

  const std::shared_ptr<Ring> ring_;
  const std::shared_ptr<Marks> marks_;
  mutable std::mutex mutex_;
  std::atomic<bool> open_{false};
  std::atomic<bool> observes_{true};
  std::vector<std::shared_ptr<End>> ends_;  // of the collectives on the host
  std::atomic<std::thread::id> trains_{};
  std::atomic<int64_t> own_ns_{0};
  int64_t watched_passes_ = 0;
  size_t count_ = 0;  // of collectives
};

// Times a scope as AORTA's own work, but for the calls of others that `without` makes in it.
class Own {
 public:
  explicit Own(Step& step) : step_(step), since_ns_(now_ns()) {}
  Own(const Own&) = delete;
  ~Own() { step_.add_own(spent_ns_ + now_ns() - since_ns_); }

  // When the last of those calls returned.
  int64_t since_ns() const { return since_ns_; }

  template <class Call>
  decltype(auto) without(Call&& call) {
    spent_ns_ += now_ns() - since_ns_;
    const struct Resumes {
      ~Resumes() { own.since_ns_ = now_ns(); }
      Own& own;
    } resumes{*this};
    return call();
  }

 private:
  Step& step_;
  int64_t since_ns_;
  int64_t spent_ns_ = 0;
};

// One call of the backend, from before its collectives are recorded until it returns or fails.
class Underway {
 public:
  explicit Underway(std::shared_ptr<Step> step) : step_(std::move(step)) { ++step_->underway; }
  Underway(const Underway&) = delete;
  ~Underway() { --step_->underway; }

 private:
  const std::shared_ptr<Step> step_;
};

// The backend's work, of which all but waits and who takes its future is the same.
class WrappedWork : public Work {
 public:
  WrappedWork(c10::intrusive_ptr<Work> work, std::shared_ptr<Step> step, const Name& of)
      : Work(-1, work->retrieveOpType()), work_(std::move(work)), step_(std::move(step)), of_(of) {}

  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }
  std::vector<at::Tensor> result() override { return work_->result(); }
  int sourceRank() const override { return work_->sourceRank(); }
  c10::intrusive_ptr<Future> getFutureResult() override { return work_->getFutureResult(); }
  void abort() override { work_->abort(); }
  float getDuration() const override { return work_->getDuration(); }
  uint64_t getSequencenumber() const override { return work_->getSequencenumber(); }
  c10::intrusive_ptr<Future> getFuture() override {
    if (in_backward()) {  // which waits for it at its end (DDP)
      step_->ring().add_flags(of_.row, flag::BY_FUTURE);
    }
    return work_->getFuture();
  }

 protected:
  const c10::intrusive_ptr<Work> work_;
  const std::shared_ptr<Step> step_;
  const Name of_;
};

// Records when a collective on the host had ended for its caller; and its caller's wait, except in an accelerator run, where
// the host may wait, and the compute stream does not.
class TimedWork final : public WrappedWork {
 public:
  TimedWork(c10::intrusive_ptr<Work> work, std::shared_ptr<Step> step, const Name& of, std::shared_ptr<End> end)
      : WrappedWork(std::move(work), std::move(step), of), end_(std::move(end)) {}

  // gloo's reduce-scatter copies its result out inside its wait, and a second one copies again (R6): other callers that
  // wait for the same handle only wait for the first one.
  bool wait(std::chrono::milliseconds timeout) override {
    const std::lock_guard<std::mutex> held(once_);
    if (!waited_.load(std::memory_order_acquire)) {
      std::optional<Own> own;
      if (!step_->marks()) {
        own.emplace(*step_);
      }
      const auto at_ns = [&] { return own ? own->since_ns() : now_ns(); };
      const int64_t begin_ns = at_ns();
      const bool blocked = end_->both() == 0;
      const auto waited = [&](int over) {
        if (own && step_->holds_up()) {
          step_->wait(of_, (blocked ? flag::BLOCKED : 0) | over, begin_ns, at_ns());
        }
      };
      try {
        answer_ = own ? own->without([&] { return work_->wait(timeout); }) : work_->wait(timeout);
      } catch (...) {  // a timeout, say, is not the end
        waited(0);
        throw;
      }
      end_->stamp(End::WAIT, at_ns());
      waited(flag::OVER);
      waited_.store(true, std::memory_order_release);
    }
    return answer_;
  }

  void synchronize() override { work_->synchronize(); }
  void blockCurrentStream() override { work_->blockCurrentStream(); }
  bool isCompleted() override { return waited_.load(std::memory_order_acquire) || work_->isCompleted(); }

 private:
  const std::shared_ptr<End> end_;
  std::mutex once_;
  bool answer_ = true;
  std::atomic<bool> waited_{false};
};

}  // namespace aorta
