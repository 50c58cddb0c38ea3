"""Which dumps of torch's Flight Recorder are of one job, and which groups of its ranks are the same.

    evidence, notes = of_one_job(evidence)

Dumps have static names, so that those of an earlier job or attempt lie beside newer ones. A dump states the ranks of
its default group, which are those of its job. Whatever needs all ranks of a group is issued by all before it completes
on any: a dump that says otherwise of another is stale, the older of both. Only what remains may accuse a rank. Must not
accuse, or compare times of unlike clocks: those of dumps are Unix times of their hosts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from aorta.autopsy.evidence import DEFAULT_GROUP, CollectiveEvidence, GroupEvidence, RankEvidence
from aorta.autopsy.job import Channel, channel_of
from aorta.command_line import name_ranks

NEED_ALL_RANKS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
"""No rank can complete these before every rank has issued them; the source of a broadcast, for example, can."""
CLOCKS_NS: Final = 60 * 1_000_000_000
"""The clocks of a job's hosts are not further apart."""
TIMEOUT_NS: Final = 30 * 60 * 1_000_000_000
"""torch's longest default timeout (`default_pg_timeout`): no rank waits longer for another."""


def of_one_job(evidence: Sequence[RankEvidence]) -> tuple[list[RankEvidence], list[str]]:
    """Return the evidence without dumps that are stale or of another job, and why these are left out."""
    dumps = [dump for dump in evidence if dump.source == "flight_recorder" and (dump.collectives or dump.groups)]
    recorded = {dump.world_size for dump in evidence if dump.source == "progress" and dump.world_size}
    newest: dict[int, int] = {}
    for dump in dumps:
        if dump.world_size:
            newest[dump.world_size] = max(newest.get(dump.world_size, 0), dump.progress_ns or 0)
    world = recorded.pop() if len(recorded) == 1 else max(newest, key=lambda size: (newest[size], size), default=None)
    why: dict[str, list[int]] = defaultdict(list)
    for dump in dumps:
        used = {row.group for row in dump.collectives}
        if world and dump.world_size and dump.world_size != world:
            why[f"of a job of {dump.world_size} ranks, and this one has {world}"].append(dump.rank)
        elif any(group.ranks and dump.rank not in group.ranks for group in dump.groups if group.name in used):
            why["its groups do not have this rank: another rank's, or another job's"].append(dump.rank)
    left_out = {rank for ranks in why.values() for rank in ranks}
    ours = [dump for dump in dumps if dump.rank not in left_out]
    for first, second in _copies(ours):  # whose, is not known; when the job ran, they tell
        why["one is a copy of the other: both have issued everything in the same nanoseconds"] += [first, second]
        left_out |= {first, second}
    for rank, reason in _stale(ours):
        if rank not in left_out:
            why[reason].append(rank)
            left_out.add(rank)
    kept = [dump for dump in evidence if dump.source != "flight_recorder" or dump.rank not in left_out]
    return kept, [f"dump of {name_ranks(sorted(set(ranks)))} left out: {reason}" for reason, ranks in why.items()]


def _copies(dumps: Sequence[RankEvidence]) -> Iterator[tuple[int, int]]:
    """Yield pairs of ranks for which one dump stands: two processes do not issue all that both dumps have in the same
    nanoseconds, where that is more than one collective.
    """
    times = {
        dump.rank: {(row.group, row.peer, row.kind, row.number): row.issued_ns for row in dump.collectives}
        for dump in dumps
    }
    first_at: dict[tuple[object, int], int] = {}
    alike = Counter[tuple[int, int]]()
    for rank, own in times.items():
        for op, at_ns in own.items():
            if at_ns is not None and (first := first_at.setdefault((op, at_ns), rank)) != rank:
                alike[first, rank] += 1
    for (first, rank), count in alike.items():
        if count > 1 and count == min(len(times[first]), len(times[rank])):
            yield first, rank


def _stale(dumps: Sequence[RankEvidence]) -> Iterator[tuple[int, str]]:
    names, groups, listed = same_groups(dumps)
    rows: dict[tuple[str, int], dict[int, CollectiveEvidence]] = defaultdict(dict)
    reached: dict[Channel, dict[int, int]] = defaultdict(dict)  # channel -> rank -> its newest number
    completed: dict[Channel, tuple[int, int]] = {}  # channel -> the newest number that completed, and where
    ended_ns: dict[tuple[str, int, int], int] = {}  # group, number, rank -> when a collective had completed
    for dump in dumps:
        newest = {row.group: row.number for row in dump.collectives}
        for row in dump.collectives:
            group = names[row.group, dump.rank]
            if group not in listed and groups[group].description != DEFAULT_GROUP:
                continue
            channel = channel_of(row, dump.rank)._replace(group=group)
            reached[channel][dump.rank] = max(row.number, reached[channel].get(dump.rank, -1))
            if row.kind in NEED_ALL_RANKS:
                rows[group, row.number][dump.rank] = row
                if row.completed_ns is not None:
                    ended_ns[group, row.number, dump.rank] = row.completed_ns
                elif row.state == "retired" and row.number < newest[row.group] and dump.progress_ns is not None:
                    ended_ns[group, row.number, dump.rank] = dump.progress_ns  # or failed, as the newest may have
            if row.completed_ns is not None and row.state == "completed" and row.kind in (*NEED_ALL_RANKS, "recv"):
                completed[channel] = max(completed.get(channel, (-1, -1)), (row.number, dump.rank))
    odd = Counter[int]()
    for (group, number), issued in rows.items():
        latest_ns = max(row.issued_ns or 0 for row in issued.values())
        ended = {rank: ended_ns[group, number, rank] for rank in issued if (group, number, rank) in ended_ns}
        kinds = Counter(issued[rank].kind for rank in ended)
        for rank, at_ns in ended.items():
            if latest_ns - at_ns > CLOCKS_NS:
                yield rank, "stale: what it has completed, others issued more than a minute later"
            odd[rank] += 2 * kinds[issued[rank].kind] < kinds.total()
    for rank, numbers in odd.items():
        if numbers > 1:  # what does not meet may complete once
            yield rank, "of another job: it has completed other collectives than most ranks of the group"
    newest_ns = {dump.rank: dump.progress_ns or 0 for dump in dumps}
    for channel, (number, where) in completed.items():
        members = channel.sides[:1] or groups[channel.group].ranks
        for dump in dumps:
            own = reached[channel].get(dump.rank, -1 if dump.from_start and dump.rank in members else number)
            if own < number and dump.torn is None:
                older = where if newest_ns[where] < newest_ns[dump.rank] else dump.rank
                yield older, "stale: a collective of all ranks completed that not all dumps have"
    oldest_ns = [
        min(times)
        for dump in dumps
        if (times := [row.issued_ns for row in dump.collectives if row.issued_ns is not None])
    ]
    for rank, last_ns in newest_ns.items():
        if last_ns and max(oldest_ns, default=0) - last_ns > TIMEOUT_NS:
            yield rank, "stale: it ends more than 30 minutes before another begins"


def same_groups(
    evidence: Sequence[RankEvidence],
) -> tuple[dict[tuple[str, int], str], dict[str, GroupEvidence], set[str]]:
    """Return one name for each group, by its name on a rank and the rank; the groups by that name; and the names of
    those whose ranks are listed.

    A group is its ranks: members of one may call it by different names, and different groups by one. Several groups of
    the same ranks have one name on all of them, or else are told apart by the order in which a rank lists them.
    """
    lists: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for entry in evidence:
        for group in entry.groups:
            lists[group.name] |= {tuple(sorted(group.ranks))} if group.ranks else set()
    leaders: dict[tuple[int, ...], list[str]] = {}  # ranks -> names of the groups of these
    names: dict[tuple[str, int], str] = {}
    groups: dict[str, GroupEvidence] = {}
    listed = set[str]()
    for entry in evidence:
        own = {group.name: group for group in entry.groups}
        for row in entry.collectives:
            own.setdefault(row.group, GroupEvidence(name=row.group))
        of_ranks: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, described in own.items():
            ranks = tuple(sorted(described.ranks))
            if not ranks and len(lists[name]) == 1:
                (ranks,) = lists[name]
            of_ranks[ranks].append(name)
        for ranks, called in of_ranks.items():
            leading = leaders.setdefault(ranks, [])
            others = iter([name for name in leading if name not in called] if ranks else [])
            for name in called:
                common = name if name in leading else next(others, name)
                if common not in leading:
                    leading.append(common)
                key = f"{common} ({','.join(map(str, ranks))})" if len(lists[common]) > 1 and ranks else common
                names[name, entry.rank] = key
                before = groups.get(key)
                description = own[name].description or (before.description if before else None)
                groups[key] = GroupEvidence(name=key, description=description, ranks=ranks)
                listed |= {key} if ranks else set()
    return names, groups, listed
