// Rows whose times are a device's: a row is appended when its span opens on the host, and says when the host recorded its
// marks; when the device passed them is stored once that is known. While the loop stands still a thread notes what the
// device has begun and ended, as the one that trains may wait for it.
//
// On a stream marks pass in the order in which they were recorded, so only the oldest of each is asked about. Must not wait
// for the device, or touch a Python object; marks come from any thread.

#pragma once

#include <pthread.h>
#include <signal.h>

#include <future>
#include <map>
#include <memory>
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
  void begin(int64_t row, Mark mark, int64_t collective = Ring::NOWHERE) { add({mark, row, collective, false}); }
  void end(int64_t row, Mark mark, int64_t collective = Ring::NOWHERE) { add({mark, row, collective, true}); }

  // Appends a row whose span is between two marks; its index.
  int64_t append(const Row& row, Mark begin_mark, Mark end_mark) {
    const int64_t index = ring_->append(row);
    begin(index, begin_mark);
    end(index, end_mark);
    return index;
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
        note(oldest);
        if (oldest.ends) {
          ring_->end(oldest.row, *at_ns);
          ring_->end(oldest.collective, *at_ns * 2);  // not `complete`: it is long ago, and no progress of now
        } else {
          ring_->begin(oldest.row, *at_ns);
        }
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
  struct Pending {
    Mark mark;
    int64_t row;
    int64_t collective;
    bool ends;
  };

  // Of one stream; of so many, from the oldest on, a look has seen that they are passed.
  struct Queue {
    std::deque<Pending> marks;
    size_t seen = 0;
  };

  void add(const Pending& pending) {
    const std::optional<int64_t> sent_ns = clock_->sent_ns(pending.mark);
    if (!sent_ns) {  // none could be taken
      ring_->add_flags(pending.collective, flag::UNMARKED);
      return;
    }
    if (pending.row == Ring::NOWHERE) {
      clock_->release(pending.mark);
      return;
    }
    ring_->sent(pending.row, pending.ends, *sent_ns);
    const std::lock_guard<std::mutex> held(mutex_);
    queues_[clock_->stream_of(pending.mark)].marks.push_back(pending);
  }

  void note(const Pending& pending) { ring_->add_flags(pending.collective, pending.ends ? flag::DONE : flag::BEGUN); }

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
  explicit Lookout(std::shared_ptr<Marks> marks) {
    static const auto exchange_mode = of_runtime<ExchangeMode>("ThreadExchangeStreamCaptureMode");
    if (exchange_mode == nullptr || !marks->ring().is_seen()) {
      return;
    }
    // A failure of the device ends it: the device's own users are told.
    std::packaged_task<void()> looks([marks = std::move(marks), over = over_.get_future()]() mutable {
      look_until_over(std::move(marks), over, exchange_mode);
    });
    auto has_left = looks.get_future();
    try {
      std::thread(std::move(looks)).detach();
      has_left_ = std::move(has_left);
    } catch (const std::system_error&) {  // as many as the process may have
    }
  }

  ~Lookout() {
    over_.set_value();
    if (has_left_.valid() && owner_ == process) {  // the thread is not in a child
      has_left_.wait_for(LEAVES_WITHIN);
    }
  }

 private:
  using ExchangeMode = int (*)(int* mode);
  static constexpr int RELAXED = 2;  // cudaStreamCaptureModeRelaxed, hipStreamCaptureModeRelaxed
  static constexpr std::chrono::milliseconds EVERY{250};
  static constexpr std::chrono::seconds LEAVES_WITHIN{1};

  // `marks` are let go before it has left.
  static void look_until_over(
      std::shared_ptr<Marks> marks, const std::future<void>& over, ExchangeMode exchange_mode) {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_BLOCK, &all, nullptr);  // they are for the program's own threads
    ::pthread_setname_np(::pthread_self(), "aorta device");
    marks->clock().use_here();
    int mode = RELAXED;
    if (exchange_mode(&mode) != 0) {
      return;
    }
    const Ring& ring = marks->ring();
    int64_t rows = ring.count();
    while (over.wait_for(EVERY) == std::future_status::timeout && Py_IsInitialized() != 0) {
      const auto goes_on = [&] {
        return ring.count() != rows || over.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
      };
      if (!goes_on()) {
        marks->look(goes_on);
      }
      rows = ring.count();
    }
  }

  const pid_t owner_ = process;
  std::promise<void> over_;
  std::future<void> has_left_;
};

// Which communicator runs a collective on a device, beside the ranks' numbers: a pair has one with each of them.
constexpr int64_t OF_THE_GROUP = -1;
constexpr int64_t UNKNOWN = -2;

// Why a collective on a device has no end (`ring_file.py` has the words).
enum class Untimed : uint8_t { NO_STREAM = 1, STACKED_IN_A_BATCH = 2 };

// When a collective ran on a device: a row beside its own, if that has one. Written on the thread that issues it.
class Span {
 public:
  Span(std::shared_ptr<Marks> marks, int64_t collective) : marks_(std::move(marks)), collective_(collective) {
    if (collective != Ring::NOWHERE) {
      row_ = marks_->ring().append({Kind::SPAN, 0, 0, 0, 0, 0, 0, 0, collective, packed(-1, OF_THE_GROUP)});
    }
  }

  void begins(Mark mark) { marks_->begin(row_, mark, collective_); }
  void ends(Mark mark) { marks_->end(row_, mark, collective_); }
  void is_part_of(int64_t launch) { marks_->ring().store_y(row_, packed(launch, OF_THE_GROUP)); }
  void is_run_by(int64_t communicator) { marks_->ring().store_y(row_, packed(-1, communicator)); }
  void has_no_end(Untimed why) {
    marks_->ring().add_flags(row_, static_cast<uint8_t>(why));
    marks_->ring().add_flags(collective_, flag::UNMARKED);
  }

 private:
  // 0 stands for a collective that was launched by itself, and for one whose communicator nobody knows.
  static int64_t packed(int64_t launch, int64_t communicator) { return (launch + 1) << 32 | (communicator - UNKNOWN); }

  const std::shared_ptr<Marks> marks_;
  const int64_t collective_;
  int64_t row_ = Ring::NOWHERE;
};

}  // namespace aorta
