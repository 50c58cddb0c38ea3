// The algebra of `aorta/timeline/intervals.py`, compiled: the operations that `overlap.measure_lanes` is made of.
//
// Lists of Python (start, end) pairs become `Spans`, opaque to Python and equal to what `intervals` gives for the same
// pairs (tests/instrument/test_native_algebra.py). Must not know what an interval stands for, or a metric.

#pragma once

#include <algorithm>
#include <cstdint>
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

// Spans as Python objects, and functions on them. A step makes about thirty calls: they bypass pybind11, whose overhead
// per call is several times the cost of the algebra.
struct SpansObject {
  PyObject_HEAD
  Spans spans;
};

inline PyTypeObject* spans_type = nullptr;

inline PyObject* given(Spans spans) {
  auto* object = PyObject_New(SpansObject, spans_type);
  if (object == nullptr) {
    throw py::error_already_set();
  }
  new (&object->spans) Spans(std::move(spans));
  return reinterpret_cast<PyObject*>(object);
}

inline bool are_spans(PyObject* value) { return Py_TYPE(value) == spans_type; }

inline const Spans& spans_of(PyObject* value) {
  if (!are_spans(value)) {
    throw py::type_error("not what lane, union, intersect or subtract gave");
  }
  return reinterpret_cast<SpansObject*>(value)->spans;
}

template <typename F>
void each(PyObject* values, F&& look) {
  const auto items = py::reinterpret_steal<py::object>(PySequence_Fast(values, "not a sequence or an iterable"));
  if (!items) {
    throw py::error_already_set();
  }
  for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(items.ptr()); ++at) {
    look(PySequence_Fast_GET_ITEM(items.ptr(), at));
  }
}

// The parts of any intervals that lie inside the window.
inline Spans lane(PyObject* raw, const Interval& window) {
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
  if (are_spans(raw)) {
    for (const Interval& span : spans_of(raw).all) {
      clip(span);
    }
  } else {
    each(raw, [&](PyObject* span) { clip(pair_of(span)); });
  }
  return merged(std::move(inside));
}

inline Spans unite(PyObject* parts) {
  std::vector<Interval> any;
  each(parts, [&](PyObject* part) {
    const auto& spans = spans_of(part).all;
    any.insert(any.end(), spans.begin(), spans.end());
  });
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

inline py::list pairs(const Spans& spans) {
  py::list rows(spans.all.size());
  for (size_t at = 0; at < spans.all.size(); ++at) {
    rows[at] = py::make_tuple(spans.all[at].first, spans.all[at].second);
  }
  return rows;
}

// Stretches of the window in which the set of active lanes does not change: (start, end, mask), in order.
inline py::list tile(const Interval& window, PyObject* lanes) {
  if (!PyDict_Check(lanes)) {
    throw py::type_error("lanes are a dict of bit -> spans");
  }
  std::vector<std::pair<int64_t, uint64_t>> edges{{window.first, 0}, {window.second, 0}};
  PyObject *bit = nullptr, *lane = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(lanes, &at, &bit, &lane);) {
    const uint64_t mask = uint64_t{1} << integer(bit);
    for (const Interval& span : spans_of(lane).all) {
      edges.emplace_back(span.first, mask);
      edges.emplace_back(span.second, mask);
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

// A function of the module: `count` positional arguments; C++ exceptions are translated to Python's.
template <Py_ssize_t count, PyObject* (*function)(PyObject* const*)>
PyObject* call(PyObject* /*module*/, PyObject* const* arguments, Py_ssize_t given_count) {
  try {
    if (given_count != count) {
      throw py::type_error("wrong number of arguments");
    }
    return function(arguments);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

inline PyObject* call_lane(PyObject* const* taken) { return given(lane(taken[0], pair_of(taken[1]))); }
inline PyObject* call_unite(PyObject* const* taken) { return given(unite(taken[0])); }
inline PyObject* call_intersect(PyObject* const* taken) {
  return given(intersect(spans_of(taken[0]), spans_of(taken[1])));
}
inline PyObject* call_subtract(PyObject* const* taken) {
  return given(subtract(spans_of(taken[0]), spans_of(taken[1])));
}
inline PyObject* call_measure(PyObject* const* taken) { return PyLong_FromLongLong(measure(spans_of(taken[0]))); }
inline PyObject* call_tile(PyObject* const* taken) { return tile(pair_of(taken[0]), taken[1]).release().ptr(); }
inline PyObject* call_pairs(PyObject* const* taken) { return pairs(spans_of(taken[0])).release().ptr(); }

inline void free_spans(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  reinterpret_cast<SpansObject*>(self)->spans.~Spans();
  PyObject_Free(self);
  Py_DECREF(type);
}

template <Py_ssize_t count, PyObject* (*function)(PyObject* const*)>
PyMethodDef method(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(&call<count, function>), METH_FASTCALL, nullptr};
}

inline void define_algebra(py::module_& module) {
  static PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(&free_spans)}, {0, nullptr}};
  static PyType_Spec spec{
      "aorta.Spans", sizeof(SpansObject), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  spans_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  static PyMethodDef methods[] = {
      method<2, call_lane>("lane"),
      method<1, call_unite>("unite"),
      method<2, call_intersect>("intersect"),
      method<2, call_subtract>("subtract"),
      method<1, call_measure>("measure"),
      method<2, call_tile>("tile"),
      method<1, call_pairs>("pairs"),
      {nullptr, nullptr, 0, nullptr}};
  if (spans_type == nullptr || PyModule_AddFunctions(module.ptr(), methods) != 0) {
    throw py::error_already_set();
  }
}

}  // namespace aorta
