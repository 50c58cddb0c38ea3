// A rank's ring: where it is in its loop, and rows of what happened, as it happens (`aorta/records/progress.py` and
// `ring_file.py` have the layout and the readers).
//
// A row is a span: it is appended when it opens, and its end is stored in place. Appending never waits: one fetch_add and
// stores into one cache line, from any thread and without the interpreter. A full ring overwrites its oldest rows, which a
// reader sees from the stamps. Step and phase are words of the first page.

#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/pybind.h>


namespace aorta {

// The running process, also in a forked child: what a data worker does is none of its parent's recording.
inline std::atomic<pid_t> process{::getpid()};

// Kinds and flags that compiled code writes; numbers as `ring_file.py` has them.
enum class Kind : uint8_t {
  STEP = 1,
  COLLECTIVE = 2,
  WAIT = 3,
  PASS = 4,
  TAIL = 5,
  VALUE = 12,
  SUMMARY = 13,
  SPAN = 15,
  COPY = 16,
  GAP = 17,
  JOINED = 18,
  NOTE = 19
};
namespace flag {
constexpr uint8_t BLOCKED = 1, OVER = 2, BACKWARD = 1, BY_FUTURE = 1, UNWATCHED = 2, ON_DEVICE = 4;
constexpr uint8_t UNMARKED = 8, BEGUN = 16, DONE = 32;
constexpr uint8_t COMPUTES = 4, ELSEWHERE = 8, CONTINUES = 2, PASSED_OVER = 32, LR = 2, DRAWN = 6;
}

struct Row {
  Kind kind;
  uint8_t flags = 0;
  uint8_t op = 0;
  uint8_t dtype = 0;
  uint16_t group = 0;
  uint16_t name = 0;
  int64_t a = 0;
  int64_t b = 0;
  int64_t x = 0;
  int64_t y = 0;
  int64_t a2 = 0;
  int64_t b2 = 0;
};

class Ring {
 public:
  static constexpr int64_t NOWHERE = -1;
  static constexpr uint8_t NO_DTYPE = 0xFF;
  static constexpr int64_t NO_PEER = 0xFFFFFFFF;
  static constexpr int64_t NOT_COUNTED = -(int64_t{1} << 62);

  // The words of step and phase, of the time, and of how many steps have ended; how step, phase and the time's lowest bits
  // share the first.
  using Layout = std::array<int64_t, 6>;
  using Types = std::vector<at::ScalarType>;

  // Positions are in bytes: of the count of rows, behind which are the times of progress and of the last look at a device,
  // and of the first row. `slots`: a power of two. Without a file (-1) the ring is at `address`, which stays mapped.
  Ring(
      int file,
      uintptr_t address,
      size_t count_at,
      size_t rows_at,
      size_t slots,
      const Types& dtypes,
      const Layout& layout)
      : layout_(layout),
        slots_(slots),
        bytes_(file < 0 ? 0 : rows_at + slots * sizeof(Slot)),
        memory_(reinterpret_cast<void*>(address)) {
    if (file >= 0) {
      memory_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    }
    if (memory_ == MAP_FAILED) {
      throw std::runtime_error(std::string("the ring cannot be mapped: ") + std::strerror(errno));
    }
    words_ = static_cast<std::atomic<int64_t>*>(memory_);
    count_ = reinterpret_cast<std::atomic<uint64_t>*>(static_cast<char*>(memory_) + count_at);
    moved_ = words_ + count_at / sizeof(int64_t) + 1;
    looked_ = moved_ + 1;
    rows_ = reinterpret_cast<Slot*>(static_cast<char*>(memory_) + rows_at);
    dtypes_.fill(NO_DTYPE);
    for (size_t number = 0; number < dtypes.size(); ++number) {
      dtypes_[static_cast<size_t>(dtypes[number])] = static_cast<uint8_t>(number);
    }
  }
  ~Ring() {
    if (bytes_ > 0) {
      ::munmap(memory_, bytes_);
    }
  }
  Ring(const Ring&) = delete;

  // Returns its index.
  int64_t append(const Row& row) {
    if (owner_ != process) {
      return NOWHERE;
    }
    const uint64_t index = count_->fetch_add(1, std::memory_order_relaxed);
    Slot& slot = rows_[index & (slots_ - 1)];
    slot.stamp.store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    slot.row = row;
    slot.stamp.store(index + 1, std::memory_order_release);
    __builtin_prefetch(&rows_[(index + 1) & (slots_ - 1)], 1);  // the next row's, which is in no cache
    return static_cast<int64_t>(index);
  }

  // A collective is issued, in the process that made the ring.
  int64_t issue(const Row& row) {
    const int64_t index = append(row);
    moved_->store(row.a, std::memory_order_relaxed);
    return index;
  }

  // It has ended, by `both`: twice the time, and what said so.
  void complete(int64_t index, int64_t both) {
    if (index != NOWHERE && owner_ == process) {
      end(index, both);
      moved_->store(std::max(moved_->load(std::memory_order_relaxed), both >> 1), std::memory_order_relaxed);
    }
  }

  // At that time the device had passed all that rows say, and `more` than when it was looked at before.
  void looked(int64_t at_ns, bool more) {
    if (more) {
      moved_->store(std::max(moved_->load(std::memory_order_relaxed), at_ns), std::memory_order_relaxed);
    }
    looked_->store(at_ns, std::memory_order_release);
  }

  // A phase of the training thread begins; returns the one before.
  int64_t enter(int64_t phase, int64_t at_ns) {
    const auto& [state_at, since_at, done_at, step_shift, phase_shift, since_mask] = layout_;
    const int64_t state = words_[state_at].load(std::memory_order_relaxed);
    note(state >> step_shift, phase, at_ns);
    return state >> phase_shift & ((1 << (step_shift - phase_shift)) - 1);
  }

  // Its step ends, and is counted.
  void count_step() {
    if (owner_ == process) {
      words_[layout_[2]].fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Step and phase of the training thread. Two stores, each of a whole word: the kernel may end the process between them.
  void note(int64_t step, int64_t phase, int64_t at_ns) {
    if (owner_ != process) {
      return;
    }
    const auto& [state_at, since_at, done_at, step_shift, phase_shift, since_mask] = layout_;
    words_[since_at].store(at_ns, std::memory_order_release);
    words_[state_at].store(
        step << step_shift | phase << phase_shift | (at_ns & since_mask), std::memory_order_release);
  }

  // The span of a row ends.
  void end(int64_t index, int64_t b) {
    if (Row* row = at(index)) {
      std::atomic_ref(row->b).store(b, std::memory_order_release);
    }
  }

  // The same of its begin.
  void begin(int64_t index, int64_t a) {
    if (Row* row = at(index)) {
      row->a = a;
    }
  }

  // When the host recorded the mark that begins or ends its span. Of a collective on the host: when the call that issued it
  // returned.
  void sent(int64_t index, bool ends, int64_t at_ns) {
    if (Row* row = at(index)) {
      (ends ? row->b2 : row->a2) = at_ns;
    }
  }

  void store_y(int64_t index, int64_t y) {
    if (Row* row = at(index)) {
      row->y = y;
    }
  }

  // When a step began and ended on a device.
  void time_step(int64_t index, int64_t a, int64_t b) {
    begin(index, a);
    end(index, b);
  }

  void add_flags(int64_t index, uint8_t flags) {
    if (Row* row = at(index)) {
      std::atomic_ref(row->flags).fetch_or(flags, std::memory_order_relaxed);
    }
  }

  // Whether another process can see it.
  bool is_seen() const { return bytes_ > 0; }

  int64_t count() const { return static_cast<int64_t>(count_->load(std::memory_order_relaxed)); }

  uint8_t number_of(at::ScalarType dtype) const { return dtypes_[static_cast<size_t>(dtype)]; }

 private:
  struct alignas(64) Slot {
    std::atomic<uint64_t> stamp;  // 0 while it is written, then 1 + index
    Row row;
  };
  static_assert(sizeof(Slot) == 64);

  // None where it has been overwritten.
  Row* at(int64_t index) {
    if (index < 0 || owner_ != process) {
      return nullptr;
    }
    Slot& slot = rows_[static_cast<uint64_t>(index) & (slots_ - 1)];
    return slot.stamp.load(std::memory_order_acquire) == static_cast<uint64_t>(index) + 1 ? &slot.row : nullptr;
  }

  const pid_t owner_ = ::getpid();
  const Layout layout_;
  const uint64_t slots_;
  const size_t bytes_;
  void* memory_ = nullptr;
  std::atomic<int64_t>* words_ = nullptr;
  std::atomic<uint64_t>* count_ = nullptr;
  std::atomic<int64_t>* moved_ = nullptr;
  std::atomic<int64_t>* looked_ = nullptr;
  Slot* rows_ = nullptr;
  std::array<uint8_t, 256> dtypes_{};
};

}  // namespace aorta
