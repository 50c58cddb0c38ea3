// Rows whose times are a device's: a row is appended when its span opens on the host, and says when the host recorded its
// marks; when the device passed them is stored once that is known.
//
// On a stream marks pass in the order in which they were recorded, so only the oldest of each is asked about. Must not wait
// for the device, or touch a Python object; marks come from any thread.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
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

  // A mark begins the span of a row, or ends it. Without a row it is used again.
  void begin(int64_t row, Mark mark) { add({mark, row, Edge::BEGIN}); }
  void end(int64_t row, Mark mark) { add({mark, row, Edge::END}); }
  // That of a collective's span, which is the end of the collective.
  void end_of(int64_t collective, int64_t span, Mark mark) { add({mark, span, Edge::END, collective}); }

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
      while (!queue.empty()) {
        const std::optional<int64_t> at_ns = clock_->read_ns(queue.front().mark);
        if (!at_ns) {
          break;
        }
        store(queue.front(), *at_ns);
        clock_->release(queue.front().mark);
        queue.pop_front();
      }
    }
  }

 private:
  enum class Edge : uint8_t { BEGIN, END };

  struct Pending {
    Mark mark;
    int64_t row;
    Edge edge;
    int64_t collective = Ring::NOWHERE;
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
    queues_[clock_->stream_of(pending.mark)].push_back(pending);
  }

  void store(const Pending& pending, int64_t at_ns) {
    if (pending.edge == Edge::BEGIN) {
      ring_->begin(pending.row, at_ns);
      return;
    }
    ring_->end(pending.row, at_ns);
    ring_->end(pending.collective, at_ns * 2);  // not `complete`: it is known only when the step is read, and is no progress of now
  }

  const std::shared_ptr<DeviceClock> clock_;
  const std::shared_ptr<Ring> ring_;
  std::mutex mutex_;
  std::map<c10::StreamId, std::deque<Pending>> queues_;
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

  void begins(Mark mark) { marks_->begin(row_, mark); }
  void ends(Mark mark) { marks_->end_of(collective_, row_, mark); }
  void is_part_of(int64_t launch) {
    launch_ = launch;
    marks_->ring().store_y(row_, packed());
  }
  void is_run_by(int64_t communicator) {
    communicator_ = communicator;
    marks_->ring().store_y(row_, packed());
  }
  void has_no_end(Untimed why) { marks_->ring().add_flags(row_, static_cast<uint8_t>(why)); }
  // A backward pass took its future, and waits for that at its end (DDP).
  void taken_in_backward() { marks_->ring().add_flags(collective_, flag::BY_FUTURE); }

 private:
  // 0 stands for a collective that was launched by itself, and for one whose communicator nobody knows.
  int64_t packed() const { return (launch_ + 1) << 32 | (communicator_ - UNKNOWN); }

  const std::shared_ptr<Marks> marks_;
  int64_t collective_ = Ring::NOWHERE;
  int64_t row_ = Ring::NOWHERE;
  int64_t launch_ = -1;
  int64_t communicator_ = OF_THE_GROUP;
};

}  // namespace aorta
