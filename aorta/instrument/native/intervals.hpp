// The algebra of `aorta/timeline/intervals.py`, compiled: the operations that `overlap.measure_window` is made of.
//
// Enters: lists of (start, end) pairs of Python. Leaves: `Spans`, opaque to Python, equal to what `intervals` gives for the
// same pairs (tests/timeline/test_compiled.py). Must not: know what an interval stands for, or what a metric is.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include <torch/csrc/utils/pybind.h>

namespace aorta {

using Interval = std::pair<int64_t, int64_t>;  // [start_ns, end_ns)

// Sorted, disjoint, non-empty, non-abutting.
struct Spans {
  std::vector<Interval> all;
};

inline int64_t integer(PyObject* value) {
  const int64_t found = PyLong_AsLongLong(value);
  if (found == -1 && PyErr_Occurred() != nullptr) {
    throw py::error_already_set();
  }
  return found;
}

inline Interval pair_of(PyObject* value) {
  if (!PyTuple_Check(value) || PyTuple_GET_SIZE(value) != 2) {
    throw py::type_error("an interval is a (start, end) tuple");
  }
  return {integer(PyTuple_GET_ITEM(value, 0)), integer(PyTuple_GET_ITEM(value, 1))};
}

[[noreturn]] inline void refuse_inverted(const Interval& span) {
  const py::object refusal = py::module_::import("aorta.timeline.intervals").attr("inverted")(span.first, span.second);
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(refusal.ptr())), refusal.ptr());
  throw py::error_already_set();
}

inline Spans merged(std::vector<Interval> any) {
  if (!std::is_sorted(any.begin(), any.end())) {
    std::sort(any.begin(), any.end());
  }
  Spans spans;
  for (const Interval& span : any) {
    if (!spans.all.empty() && span.first <= spans.all.back().second) {
      spans.all.back().second = std::max(spans.all.back().second, span.second);
    } else {
      spans.all.push_back(span);
    }
  }
  return spans;
}

// The parts of any intervals that lie inside the window.
inline Spans lane(const py::object& raw, const std::pair<int64_t, int64_t>& window) {
  std::vector<Interval> inside;
  const auto clip = [&](const Interval& span) {
    if (span.second < span.first) {
      refuse_inverted(span);
    }
    const Interval cut{std::max(span.first, window.first), std::min(span.second, window.second)};
    if (cut.first < cut.second) {
      inside.push_back(cut);
    }
  };
  if (py::isinstance<Spans>(raw)) {
    for (const Interval& span : raw.cast<const Spans&>().all) {
      clip(span);
    }
  } else {
    const auto items =
        py::reinterpret_steal<py::object>(PySequence_Fast(raw.ptr(), "intervals are a sequence or an iterable"));
    if (!items) {
      throw py::error_already_set();
    }
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(items.ptr()); ++at) {
      clip(pair_of(PySequence_Fast_GET_ITEM(items.ptr(), at)));
    }
  }
  return merged(std::move(inside));
}

inline Spans unite(const std::vector<const Spans*>& parts) {
  std::vector<Interval> any;
  for (const Spans* part : parts) {
    any.insert(any.end(), part->all.begin(), part->all.end());
  }
  return merged(std::move(any));
}

inline Spans intersect(const Spans& left, const Spans& right) {
  Spans common;
  for (auto mine = left.all.begin(), other = right.all.begin(); mine != left.all.end() && other != right.all.end();) {
    const Interval both{std::max(mine->first, other->first), std::min(mine->second, other->second)};
    if (both.first < both.second) {
      common.all.push_back(both);
    }
    mine->second < other->second ? ++mine : ++other;
  }
  return common;
}

inline Spans subtract(const Spans& left, const Spans& right) {
  Spans rest;
  auto other = right.all.begin();
  for (auto [start, end] : left.all) {
    while (other != right.all.end() && other->second <= start) {
      ++other;
    }
    for (auto hole = other; hole != right.all.end() && hole->first < end; ++hole) {
      if (start < hole->first) {
        rest.all.emplace_back(start, hole->first);
      }
      start = std::max(start, hole->second);
    }
    if (start < end) {
      rest.all.emplace_back(start, end);
    }
  }
  return rest;
}

inline int64_t measure(const Spans& spans) {
  int64_t length = 0;
  for (const Interval& span : spans.all) {
    length += span.second - span.first;
  }
  return length;
}

// Stretches of the window in which the set of active lanes does not change: (start, end, mask), in order.
inline py::list tile(const std::pair<int64_t, int64_t>& window, const std::map<int, const Spans*>& lanes) {
  std::vector<std::pair<int64_t, uint64_t>> edges{{window.first, 0}, {window.second, 0}};
  for (const auto& [bit, lane] : lanes) {
    for (const Interval& span : lane->all) {
      edges.emplace_back(span.first, uint64_t{1} << bit);
      edges.emplace_back(span.second, uint64_t{1} << bit);
    }
  }
  std::sort(edges.begin(), edges.end());
  struct Tile {
    int64_t start, end;
    uint64_t mask;
  };
  std::vector<Tile> tiles;
  uint64_t active = 0;
  int64_t before = window.first;
  for (const auto& [now, toggled] : edges) {
    if (now > before) {
      if (!tiles.empty() && tiles.back().mask == active) {
        tiles.back().end = now;
      } else {
        tiles.push_back({before, now, active});
      }
      before = now;
    }
    active ^= toggled;
  }
  py::list rows(tiles.size());
  for (size_t at = 0; at < tiles.size(); ++at) {
    rows[at] = py::make_tuple(tiles[at].start, tiles[at].end, tiles[at].mask);
  }
  return rows;
}

}  // namespace aorta
