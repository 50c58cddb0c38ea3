// Which task is ordered behind which, and which two touch the same bytes without an order between them.
//
// Happens-before by vector clocks, kept on the host when work is issued: what is found depends on what the program
// asked for, never on when a stream's thread came to it. Every stream counts its tasks; an event carries all counts
// that are ordered before it; a stream that waits for it takes them over; a host that waits takes them over for all
// that it launches later.
//
// A query that says "it has happened" also orders, but only for who looked at the answer. It therefore orders the
// giving back of memory (which a program does because of the answer) and not later launches: otherwise a device that
// happens to be quick would hide a missing wait.
// All functions expect the caller to hold `issue_mutex()`. Must not: know time, tensors or Python.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sim {

// Guards every vector clock and every block's accesses, and makes "checked" and "queued" one step.
std::mutex& issue_mutex();

// Counts of tasks by stream number; missing entries are 0.
using VectorClock = std::vector<uint64_t>;
using SharedClock = std::shared_ptr<const VectorClock>;
void join(VectorClock& into, const VectorClock& other);
inline uint64_t count_of(const VectorClock& clock, size_t stream) { return stream < clock.size() ? clock[stream] : 0; }

// Bytes that a tensor occupies: `rows` runs of `row_bytes`, `stride` apart. A contiguous tensor is one row.
struct Region {
  uintptr_t begin = 0;
  size_t row_bytes = 0;
  size_t stride = 0;
  size_t rows = 1;
  uintptr_t end() const { return begin + (rows - 1) * stride + row_bytes; }
  bool operator==(const Region& other) const {
    return begin == other.begin && row_bytes == other.row_bytes && stride == other.stride && rows == other.rows;
  }
};
bool overlap(const Region& one, const Region& other);

// One access to a block that later ones may conflict with.
struct Access {
  Region region;
  size_t stream;   // number, see Stream::number
  uint64_t count;  // of the stream when it was issued
  bool write;
  const std::string* name;  // interned
};

// What is known of the accesses to one block of memory. The block is the allocator's; it holds this.
struct Accesses {
  std::vector<Access> known;
};

const std::string* interned(const std::string& name);

// Declares an access by a task of stream `stream`, whose clock is `clock`, and reports what it conflicts with.
void access(Accesses& accesses, const Region& region, bool write, size_t stream, const VectorClock& clock,
            const std::string& name);

// The allocator may hand the block out again on its own stream: everything known has to be ordered before `clock` or
// before `polled` (what the host had seen happen when it gave the block back).
void given_away(Accesses& accesses, const Region& whole, size_t stream, const VectorClock& clock,
                const VectorClock& polled);

// Accesses of these streams are protected by the allocator (`record_stream`).
void protect(Accesses& accesses, const std::vector<size_t>& streams);

// The host's knowledge: joined into every stream at its next launch.
void host_saw(const VectorClock& clock);
void host_polled(const VectorClock& clock);
const VectorClock& host_clock();
uint64_t host_version();  // grows with every change of host_clock()
const VectorClock& polled_clock();

struct RaceSide {
  std::string name;
  size_t stream;
  bool write;
  uintptr_t begin, end;
};
struct Race {
  RaceSide first, second;
  uintptr_t begin, end;  // hull of what both touch
  int64_t times;
};
std::vector<Race> races();
void clear_races();

}  // namespace sim
