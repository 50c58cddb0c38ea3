"""How the changes of a what-if (`changes`) are written.

    parse_changes(["network.bandwidth=x2", "rank.3.late_ms=-5"])

    comm=free                       all communication costs nothing
    comm=x2                         ... is twice as fast
    comm.kind.allreduce=x2          one kind of collective
    comm.group.0=free               one process group
    comm.bytes.1e6-4e6=free         by size of the full array
    comm.position.3=free            the collective that a rank issues as its fourth in a step
    network.bandwidth=x2            twice as much; or in GB/s: network.bandwidth=10
    network.latency=x0.5            half of it; or in microseconds: network.latency=20
    network.algorithm=tree          ring or tree
    rank.3.late_ms=5                rank 3 is 5 ms later to every collective; -5: 5 ms earlier
    stragglers=none                 no rank is slower than the typical one
    compute=x1.5                    blocks compute 1.5 times as fast
    overlap=off                     DDP reduces behind the backward pass, FSDP gathers each block when it is needed
    buckets.mb=25                   DDP's bucket_cap_mb (MiB); x2: twice as large
    prefetch=2                      FSDP gathers so many blocks ahead, in both passes; 0: none
    ranks=512                       as many ranks, compute as recorded

Must not apply a change.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Final, Literal

from aorta.analysis.whatif.changes import (
    BucketCap,
    Change,
    CommSpeed,
    ComputeSpeed,
    NetworkChange,
    NoStragglers,
    OverlapSwitch,
    PrefetchDepth,
    RankLateness,
    Selection,
    WorldSize,
    in_order,
)
from aorta.config.schema import Algorithm
from aorta.errors import InputError
from aorta.timeline.classes import KINDS

_FACTOR: Final = re.compile(r"x([0-9.eE+-]+)")
_FORMS: Final = {
    "comm": "comm=free, comm=x2",
    "comm.kind.KIND": "comm.kind.allreduce=free, comm.kind.allreduce=x2",
    "comm.group.NAME": "comm.group.0=free",
    "comm.bytes.LEAST-MOST": "comm.bytes.1e6-4e6=free (either end may be left out)",
    "comm.position.N": "comm.position.3=free (counted from 0)",
    "network.bandwidth": "network.bandwidth=x2, network.bandwidth=10 (GB/s)",
    "network.latency": "network.latency=x0.5, network.latency=20 (microseconds)",
    "network.algorithm": "network.algorithm=tree",
    "rank.N.late_ms": "rank.3.late_ms=5, rank.3.late_ms=-5",
    "stragglers": "stragglers=none",
    "compute": "compute=x1.5",
    "overlap": "overlap=on, overlap=off",
    "buckets.mb": "buckets.mb=25 (MiB), buckets.mb=x2",
    "prefetch": "prefetch=2",
    "ranks": "ranks=512",
}
"""What can be set -> how it is written."""
FACTOR_LIMIT: Final = 1e6
"""A factor is at most this, and at least its inverse: beyond it 64 bits of nanoseconds could overflow."""
LATE_LIMIT_MS: Final = 1e9
RANKS_LIMIT: Final = 1 << 20
PREFETCH_LIMIT: Final = 64


def forms() -> list[str]:
    """How every change is written, an example each."""
    return list(_FORMS.values())


def parse_changes(texts: Sequence[str]) -> tuple[Change, ...]:
    """Read changes, and put them into the order in which they are applied.

    Raises:
        InputError: one is not understood; the message says what is allowed.
    """
    return in_order([parse_change(text) for text in texts])


def is_count(text: str) -> bool:
    """Whether a text is a plain number from 0; of `str.isdigit`, also what `int` refuses is."""
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def parse_change(text: str) -> Change:
    """Read one change, `TARGET=VALUE`.

    Raises:
        InputError: it is not understood.
    """
    target, equals, value = (part.strip() for part in text.partition("="))
    head, *rest = target.split(".")
    readers: dict[str, Callable[[str, list[str], str], Change]] = {
        "comm": _comm,
        "network": _network,
        "rank": _late,
        "stragglers": _level,
        "compute": _compute,
        "ranks": _ranks,
        "overlap": _overlap,
        "buckets": _buckets,
        "prefetch": _prefetch,
    }
    if not equals or not value or head not in readers:
        near = get_close_matches(target, _FORMS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise _refused(text, f"expected TARGET=VALUE{hint}", *_FORMS)
    return readers[head](text, rest, value)


def _comm(text: str, rest: list[str], value: str) -> CommSpeed:
    factor = math.inf if value == "free" else _factor(text, value, "free or a factor such as x2", "comm")
    match rest:
        case []:
            return CommSpeed(text, Selection(), factor)
        case ["kind", kind]:
            if kind not in KINDS:
                raise _refused(text, f"{kind!r} is no kind of collective; the kinds are {', '.join(KINDS)}")
            return CommSpeed(text, Selection(kind=kind), factor)
        case ["group", *name] if name:
            return CommSpeed(text, Selection(group=".".join(name)), factor)
        case ["position", place]:
            if not is_count(place):
                raise _refused(text, f"position {place!r} is no number from 0", "comm.position.N")
            return CommSpeed(text, Selection(position=int(place)), factor)
        case ["bytes", *sizes] if sizes:
            least, most = _sizes(text, ".".join(sizes))
            return CommSpeed(text, Selection(least_bytes=least, most_bytes=most), factor)
    raise _refused(text, "not a selection of collectives", *(form for form in _FORMS if form.startswith("comm")))


def _network(text: str, rest: list[str], value: str) -> NetworkChange:
    match rest:
        case ["algorithm"]:
            if value not in {each.value for each in Algorithm}:
                raise _refused(text, f"{value!r} is no algorithm; ring and tree are")
            return NetworkChange(text, "algorithm", algorithm=Algorithm(value))
        case ["bandwidth" | "latency" as field]:
            unit = "GB/s" if field == "bandwidth" else "microseconds"
            if value.startswith("x"):
                return NetworkChange(text, _field(field), factor=_factor(text, value, "", f"network.{field}"))
            number = _number(text, value, f"a factor such as x2, or {unit} such as 10", f"network.{field}")
            if number < 0 or (field == "bandwidth" and number < 1 / FACTOR_LIMIT):
                raise _refused(text, f"{number:g} {unit}", f"network.{field}")
            return NetworkChange(text, _field(field), absolute=number)
    raise _refused(text, "not a property of a network", *(form for form in _FORMS if form.startswith("network")))


def _field(name: str) -> Literal["bandwidth", "latency"]:
    return "bandwidth" if name == "bandwidth" else "latency"


def _late(text: str, rest: list[str], value: str) -> RankLateness:
    match rest:
        case [rank, "late_ms"] if is_count(rank):
            late_ms = _number(text, value, "milliseconds", "rank.N.late_ms")
            if abs(late_ms) > LATE_LIMIT_MS:
                raise _refused(text, f"at most {LATE_LIMIT_MS:g} ms, not {late_ms:g}", "rank.N.late_ms")
            return RankLateness(text, int(rank), late_ms)
    raise _refused(text, "not a change of a rank", "rank.N.late_ms")


def _level(text: str, rest: list[str], value: str) -> NoStragglers:
    if rest or value != "none":
        raise _refused(text, "stragglers can be taken away, all of them", "stragglers")
    return NoStragglers(text)


def _compute(text: str, rest: list[str], value: str) -> ComputeSpeed:
    if rest:
        raise _refused(text, "all blocks are changed alike", "compute")
    return ComputeSpeed(text, _factor(text, value, "a factor such as x1.5", "compute"))


def _ranks(text: str, rest: list[str], value: str) -> WorldSize:
    if rest or not is_count(value) or not 2 <= int(value) <= RANKS_LIMIT:
        raise _refused(text, f"a world has 2 to {RANKS_LIMIT} ranks", "ranks")
    return WorldSize(text, int(value))


def _overlap(text: str, rest: list[str], value: str) -> OverlapSwitch:
    if rest or value not in {"on", "off"}:
        raise _refused(text, "overlap is on or off", "overlap")
    return OverlapSwitch(text, value == "on")


def _buckets(text: str, rest: list[str], value: str) -> BucketCap:
    if rest != ["mb"]:
        raise _refused(text, "not a property of buckets", "buckets.mb")
    if value.startswith("x"):
        return BucketCap(text, factor=_factor(text, value, "", "buckets.mb"))
    size = _number(text, value, "MiB such as 25, or a factor such as x2", "buckets.mb")
    if size <= 0:
        raise _refused(text, f"a bucket holds more than {size:g} MiB", "buckets.mb")
    return BucketCap(text, cap_bytes=size * (1 << 20))


def _prefetch(text: str, rest: list[str], value: str) -> PrefetchDepth:
    if rest or not is_count(value) or int(value) > PREFETCH_LIMIT:
        raise _refused(text, f"0 to {PREFETCH_LIMIT} blocks can be gathered ahead", "prefetch")
    return PrefetchDepth(text, int(value))


def _sizes(text: str, value: str) -> tuple[int | None, int | None]:
    match = re.fullmatch(r"([0-9.]+(?:[eE]\+?[0-9]+)?)?-([0-9.]+(?:[eE]\+?[0-9]+)?)?", value)
    if match is None or not any(match.groups()):
        raise _refused(text, f"{value!r} is no range of bytes", "comm.bytes.LEAST-MOST")
    least, most = (None if each is None else int(_number(text, each, "bytes", "")) for each in match.groups())
    if least is not None and most is not None and least > most:
        raise _refused(text, f"{least} bytes are more than {most}", "comm.bytes.LEAST-MOST")
    return least, most


def _factor(text: str, value: str, allowed: str, form: str) -> float:
    match = _FACTOR.fullmatch(value)
    if match is None:
        raise _refused(text, f"{value!r} is not {allowed or 'a factor such as x2'}", form)
    factor = _number(text, match[1], "a factor such as x2", form)
    if factor <= 0:
        raise _refused(text, f"a factor is greater than 0, not {factor:g}", form)
    if not 1 / FACTOR_LIMIT <= factor <= FACTOR_LIMIT:
        raise _refused(text, f"a factor is between {1 / FACTOR_LIMIT:g} and {FACTOR_LIMIT:g}, not {factor:g}", form)
    return factor


def _number(text: str, value: str, allowed: str, form: str) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _refused(text, f"{value!r} is not {allowed}", form) from None
    if not math.isfinite(number) or abs(number) > 1e12:
        raise _refused(text, f"{value} is beyond any machine", form)
    return number


def _refused(text: str, why: str, *names: str) -> InputError:
    allowed = "; ".join(_FORMS[name] for name in names if name in _FORMS)
    return InputError(f"--set {text}: {why}" + (f". Allowed: {allowed}" if allowed else ""))
