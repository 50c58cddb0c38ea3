// Rows whose times are a device's: a row is appended when its span opens on the host, and says when the host recorded its
// marks; when the device passed them is stored once that is known. While the loop stands still a thread notes what the
// device has begun and ended, as the one that trains may wait for it.
//
// On a stream marks pass in the order in which they were recorded, so only the oldest of each is asked about. Must not wait
// for the device, or touch a Python object; marks come from any thread.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "device_clock.hpp"
#include "ring.hpp"

namespace aorta {

class Marks {
 public:
  Marks(std::shared_ptr<DeviceClock> clock, std::shared_ptr<Ring> ring)
      : clock_(std::move(clock)), ring_(std::move(ring)) {}

  DeviceClock& clock() const { return *clock_; }
  Ring& ring() const { return *ring_; }

  // A mark begins the span of a row, or ends it, and with it its `collective`. Without a row it is used again.
  void begin(int64_t row, Mark mark, int64_t collective = Ring::NOWHERE) { add({mark, row, Edge::BEGIN, collective}); }
  void end(int64_t row, Mark mark, int64_t collective = Ring::NOWHERE) { add({mark, row, Edge::END, collective}); }

  // Appends a row whose span is between two marks; its index.
  int64_t append(const Row& row, Mark begin_mark, Mark end_mark) {
    const int64_t index = ring_->append(row);
    begin(index, begin_mark);
    end(index, end_mark);
    return index;
  }

  // Marks of which nothing is recorded.
  void drop(Mark begin_mark, Mark end_mark) {
    clock_->release(begin_mark);
    clock_->release(end_mark);
  }

  // Store what the device has passed. While a graph is being captured no event may be asked for.
  void settle() {
    if (is_capturing(clock_->current())) {
      return;
    }
    const std::lock_guard<std::mutex> held(mutex_);
    for (auto& [_, queue] : queues_) {
      while (!queue.marks.empty()) {
        const Pending& oldest = queue.marks.front();
        const std::optional<int64_t> at_ns = clock_->read_ns(oldest.mark);
        if (!at_ns) {
          break;
        }
        store(oldest, *at_ns);
        clock_->release(oldest.mark);
        queue.marks.pop_front();
        queue.seen -= queue.seen > 0;
      }
    }
  }

  // Note which collectives the device has begun and ended, not when: `settle` asks that. A thread that takes a mark has its
  // turn after each question. Ends early where the loop goes on.
  template <class GoesOn>
  void look(const GoesOn& loop_goes_on) {
    const int64_t at_ns = now_ns();
    bool more = false;
    std::unique_lock<std::mutex> held(mutex_);
    for (auto& [_, queue] : queues_) {
      while (queue.seen < queue.marks.size() && clock_->passed(queue.marks[queue.seen].mark)) {
        note(queue.marks[queue.seen++]);
        more = true;
        held.unlock();
        if (loop_goes_on()) {
          return;
        }
        held.lock();
      }
    }
    ring_->looked(at_ns, more);
  }

 private:
  enum class Edge : uint8_t { BEGIN, END };

  struct Pending {
    Mark mark;
    int64_t row;
    Edge edge;
    int64_t collective;
  };

  // Of one stream; of so many, from the oldest on, a look has seen that they are passed.
  struct Queue {
    std::deque<Pending> marks;
    size_t seen = 0;
  };

  void add(const Pending& pending) {
    const std::optional<int64_t> sent_ns = clock_->sent_ns(pending.mark);
    if (!sent_ns) {  // none could be taken
      return;
    }
    if (pending.row == Ring::NOWHERE) {
      clock_->release(pending.mark);
      return;
    }
    ring_->sent(pending.row, pending.edge == Edge::END, *sent_ns);
    const std::lock_guard<std::mutex> held(mutex_);
    queues_[clock_->stream_of(pending.mark)].marks.push_back(pending);
  }

  void note(const Pending& pending) {
    ring_->add_flags(pending.collective, pending.edge == Edge::BEGIN ? flag::BEGUN : flag::DONE);
  }

  void store(const Pending& pending, int64_t at_ns) {
    note(pending);
    if (pending.edge == Edge::BEGIN) {
      ring_->begin(pending.row, at_ns);
      return;
    }
    ring_->end(pending.row, at_ns);
    ring_->end(pending.collective, at_ns * 2);  // not `complete`: it is long ago, and no progress of now
  }

  const std::shared_ptr<DeviceClock> clock_;
  const std::shared_ptr<Ring> ring_;
  std::mutex mutex_;
  std::map<c10::StreamId, Queue> queues_;
};

// Looks at the device while the loop stands still, on a thread without the interpreter: while rows come it only reads their
// count. Its thread uses the driver in relaxed mode, as a question would end a capture of another thread in the usual one,
// and is left alone where it does not come back from the driver.
class Lookout {
 public:
  explicit Lookout(std::shared_ptr<Marks> marks) : shared_(std::make_shared<Shared>(std::move(marks))) {
    static const auto exchange_mode = of_runtime<ExchangeMode>("ThreadExchangeStreamCaptureMode");
    if (exchange_mode == nullptr || !shared_->marks->ring().is_seen()) {
      return;
    }
    shared_->runs = true;
    try {
      std::thread(run, shared_, exchange_mode).detach();
    } catch (const std::system_error&) {  // as many as the process may have
      shared_->runs = false;
    }
  }

  ~Lookout() {
    if (owner_ != process) {  // the thread is not in the child, where what it waits for would wait for it
      new std::shared_ptr<Shared>(shared_);
      return;
    }
    std::unique_lock<std::mutex> held(shared_->mutex);
    shared_->is_over = true;
    shared_->changed.notify_all();
    shared_->changed.wait_for(held, LEAVES_WITHIN, [this] { return !shared_->runs; });
  }
  Lookout(const Lookout&) = delete;
  Lookout& operator=(const Lookout&) = delete;

 private:
  using ExchangeMode = int (*)(int* mode);
  static constexpr int RELAXED = 2;  // cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed
  static constexpr std::chrono::milliseconds EVERY{250};
  static constexpr std::chrono::seconds LEAVES_WITHIN{1};

  struct Shared {
    explicit Shared(std::shared_ptr<Marks> marks) : marks(std::move(marks)) {}
    std::shared_ptr<Marks> marks;
    std::mutex mutex;
    std::condition_variable changed;
    std::atomic<bool> is_over{false};
    bool runs = false;
  };

  static void run(const std::shared_ptr<Shared>& shared, ExchangeMode exchange_mode) {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // they are for the program's own threads
    ::pthread_setname_np(::pthread_self(), "aorta device");
    try {
      shared->marks->clock().use_here();
      int mode = RELAXED;
      if (exchange_mode(&mode) == 0) {
        look_until_over(*shared);
      }
    } catch (const std::exception&) {  // the device failed, which its own users are told
    }
    const std::lock_guard<std::mutex> held(shared->mutex);
    shared->marks.reset();
    shared->runs = false;
    shared->changed.notify_all();
  }

  static void look_until_over(Shared& shared) {
    const Ring& ring = shared.marks->ring();
    int64_t rows = ring.count();
    std::unique_lock<std::mutex> held(shared.mutex);
    while (!shared.changed.wait_for(held, EVERY, [&] { return shared.is_over.load(); }) && Py_IsInitialized() != 0) {
      held.unlock();
      const auto goes_on = [&] { return ring.count() != rows || shared.is_over; };
      if (!goes_on()) {
        shared.marks->look(goes_on);
      }
      rows = ring.count();
      held.lock();
    }
  }

  const pid_t owner_ = process;
  const std::shared_ptr<Shared> shared_;
};

// Which communicator runs a collective on a device, beside the ranks' numbers: a pair has one with each of them.
constexpr int64_t OF_THE_GROUP = -1;
constexpr int64_t UNKNOWN = -2;

// Why a collective on a device has no end (`ring_file.py` has the words).
enum class Untimed : uint8_t { NO_STREAM = 1, STACKED_IN_A_BATCH = 2 };

// When a collective ran on a device: a row beside its own. Written on the thread that issues it.
class Span {
 public:
  Span(std::shared_ptr<Marks> marks) : marks_(std::move(marks)) {}

  // The row of its collective; before anything else.
  void keep_beside(int64_t collective) {
    collective_ = collective;
    if (collective != Ring::NOWHERE) {
      row_ = marks_->ring().append({Kind::SPAN, 0, 0, 0, 0, 0, 0, 0, collective, packed()});
    }
  }

  void begins(Mark mark) {
    marks_->begin(row_, mark, collective_);
    lacks(mark == NO_MARK);
  }
  void ends(Mark mark) {
    marks_->end(row_, mark, collective_);
    lacks(mark == NO_MARK);
  }
  void is_part_of(int64_t launch) {
    launch_ = launch;
    marks_->ring().store_y(row_, packed());
  }
  void is_run_by(int64_t communicator) {
    communicator_ = communicator;
    marks_->ring().store_y(row_, packed());
  }
  void has_no_end(Untimed why) {
    marks_->ring().add_flags(row_, static_cast<uint8_t>(why));
    lacks(true);
  }
  // A backward pass took its future, and waits for that at its end (DDP).
  void taken_in_backward() { marks_->ring().add_flags(collective_, flag::BY_FUTURE); }

 private:
  void lacks(bool a_mark) {
    if (a_mark) {
      marks_->ring().add_flags(collective_, flag::UNMARKED);
    }
  }

  // 0 stands for a collective that was launched by itself, and for one whose communicator nobody knows.
  int64_t packed() const { return (launch_ + 1) << 32 | (communicator_ - UNKNOWN); }

  const std::shared_ptr<Marks> marks_;
  int64_t collective_ = Ring::NOWHERE;
  int64_t row_ = Ring::NOWHERE;
  int64_t launch_ = -1;
  int64_t communicator_ = OF_THE_GROUP;
};

}  // namespace aorta
