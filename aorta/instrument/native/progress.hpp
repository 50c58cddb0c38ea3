// A mapping of a rank's progress file, and the ring of collectives in it (`aorta/records/progress_file.py` has the layout and the reader).
//
// Stores into a mapping of its own, from any thread and without the interpreter. Must not wait, or make a system call after
// it was opened.

#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace aorta {

class Progress {
 public:
  static constexpr int64_t NOWHERE = -1;

  // Positions are in words of 64 bits: of the count of collectives, of the time of the last progress, of the first slot.
  Progress(
      const std::string& path,
      int64_t count_at,
      int64_t time_at,
      int64_t ring_at,
      int64_t slots,
      int64_t slot_words,
      const std::vector<at::ScalarType>& dtypes)
      : count_at_(count_at), time_at_(time_at), ring_at_(ring_at), slots_(slots), slot_words_(slot_words) {
    const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (file < 0) {
      throw std::runtime_error(path + ": " + std::strerror(errno));
    }
    bytes_ = static_cast<size_t>(ring_at + slots * slot_words) * sizeof(int64_t);
    void* memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    const int error = errno;
    ::close(file);
    if (memory == MAP_FAILED) {
      throw std::runtime_error(path + ": " + std::strerror(error));
    }
    words_ = static_cast<int64_t*>(memory);
    dtypes_.fill(NOWHERE);
    for (size_t number = 0; number < dtypes.size(); ++number) {
      dtypes_[static_cast<size_t>(dtypes[number])] = static_cast<int64_t>(number);
    }
  }
  ~Progress() { ::munmap(words_, bytes_); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // A collective is issued; returns its index.
  int64_t issue(
      int64_t group,
      int64_t number,
      int64_t kind,
      std::optional<at::ScalarType> dtype,
      int64_t size,
      int64_t peer,
      int64_t issued_ns) {
    const std::lock_guard<std::mutex> held(mutex_);
    const int64_t index = words_[count_at_];
    int64_t* slot = slot_of(index);
    words_[count_at_] = index + 1;  // first, so that a slot that was never finished is missed
    std::atomic_ref<int64_t>(slot[0]).store(0, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    slot[1] = group;
    slot[2] = number;
    slot[3] = kind;
    slot[4] = dtype ? dtypes_[static_cast<size_t>(*dtype)] : NOWHERE;
    slot[5] = size;
    slot[6] = peer;
    slot[7] = issued_ns;
    slot[8] = 0;
    std::atomic_ref<int64_t>(slot[0]).store(index + 1, std::memory_order_release);
    words_[time_at_] = issued_ns;
    return index;
  }

  // It has completed. Nothing where its slot has been used again.
  void completed(int64_t index, int64_t at_ns) {
    const std::lock_guard<std::mutex> held(mutex_);
    int64_t* slot = slot_of(index);
    if (slot[0] == index + 1) {
      slot[8] = at_ns;
      words_[time_at_] = std::max(words_[time_at_], at_ns);
    }
  }

  // A word of the training thread's own.
  void store(int64_t at, int64_t value) { std::atomic_ref<int64_t>(words_[at]).store(value, std::memory_order_release); }

 private:
  int64_t* slot_of(int64_t index) const { return words_ + ring_at_ + index % slots_ * slot_words_; }

  const int64_t count_at_;
  const int64_t time_at_;
  const int64_t ring_at_;
  const int64_t slots_;
  const int64_t slot_words_;
  size_t bytes_ = 0;
  int64_t* words_ = nullptr;
  std::array<int64_t, 256> dtypes_{};
  std::mutex mutex_;
};

}  // namespace aorta
