"""Rules of collectives across ranks, and of one run's numbers: matching, bandwidths, stragglers, aggregates, baselines."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_MATCHING = ("tests/analysis/test_matching.py",)
_ACROSS = ("tests/analysis/test_collective_metrics.py",)
_STRAGGLER = ("tests/analysis/test_straggler.py",)
_AGGREGATE = ("tests/analysis/test_aggregate.py",)
_EXPERTS = ("tests/analysis/test_expert_load.py",)
_BASELINES = ("tests/analysis/test_baselines.py",)

COLLECTIVES: Final = (
    *rules(
        "aorta.analysis.collective_matching",
        _MATCHING,
        (
            "a number that a rank has twice is matched",
            "found: Bools = (self.ranks == size) & (self.rows == size)",
            "found: Bools = self.ranks == size",
        ),
        (
            "a number that a rank has twice is matched with a rank missing",
            "found: Bools = (self.ranks == size) & (self.rows == size)",
            "found: Bools = self.rows == size",
        ),
        (
            "two groups of one name are one",
            "distinct.setdefault((name, members), members)",
            "distinct.setdefault((name, ()), members)",
        ),
        (
            "of several groups that list a rank the first is its own",
            "if key not in known and len(groups) == 1:",
            "if key not in known:",
        ),
        (
            "the group has the size of the world",
            "                    UNKNOWN if ranks is None else len(ranks),\n",
            "                    UNKNOWN if ranks is None else len(run.ranks),\n",
        ),
        (
            "kinds that end early have a transfer",
            "                    kind in LOCKSTEP,\n",
            "                    True,\n",
        ),
        ("the step of a missed collective is trusted", "steps[-1] < missed)", "steps[-1] <= missed)"),
        (
            "what comes behind a missed collective is trusted",
            "safe.append(np.ones(len(steps[-1]), bool) if missed is None else steps[-1] < missed)",
            "safe.append(np.ones(len(steps[-1]), bool))",
        ),
        (
            "an unseen end is a match",
            "        (_NO_END, np.add.reduceat(known.astype(np.int64), starts) != found.rows),\n",
            "",
        ),
        ("a collective that a rank lacks is matched", "        (_UNMATCHED, ~found.once_on(size)),\n", ""),
        ("a group that nobody knows is matched", "        (_GROUP_UNKNOWN, size < 0),\n", ""),
        (
            "the transfer is the longest duration",
            "shortest = np.minimum.reduceat(duration, starts)",
            "shortest = np.maximum.reduceat(np.where(known, duration, 0), starts)",
        ),
        (
            "collectives are matched without their bytes",
            "kinds.setdefault((kind, size), len(kinds))",
            "kinds.setdefault((kind, 0), len(kinds))",
        ),
        (
            "collectives are matched without their kind",
            "kinds.setdefault((kind, size), len(kinds))",
            'kinds.setdefault(("", size), len(kinds))',
        ),
        (
            "collectives are matched across steps",
            "found = match([names.group[name], names.kind_and_bytes[name], piece.step, piece.seq], piece.rank)",
            "found = match([names.group[name], names.kind_and_bytes[name], piece.seq], piece.rank)",
        ),
        (
            "collectives are matched without their number",
            "names.kind_and_bytes[name], piece.step, piece.seq]",
            "names.kind_and_bytes[name], piece.step]",
        ),
    ),
    *rules(
        "aorta.analysis.collective_matching",
        _MATCHING,
        ("what has no number is matched", "        (_NOT_NUMBERED, piece.seq[order[starts]] <= UNNUMBERED),\n", ""),
        ("communication of unknown kind is matched", "        (_KIND_UNKNOWN, ~names.kind_known[first]),\n", ""),
    ),
    *rules(
        "aorta.analysis.collective_matching",
        _ACROSS,
        (
            "in a tie the first counts as the last",
            "alone=clear & (second > shortest)",
            "alone=clear & (second >= shortest)",
        ),
        (
            "a collective of the warm-up counts whole",
            "found.once_on(size) & np.logical_and.reduceat(piece.used[order], starts)",
            "found.once_on(size)",
        ),
        (
            "a collective that only one rank warmed up with is left out",
            "used=np.logical_or.reduceat(piece.used[order], starts)",
            "used=np.logical_and.reduceat(piece.used[order], starts)",
        ),
        (
            "a piece ends inside of a step",
            "int(every[min(start + each, len(every)) - 1]) + 1)",
            "int(every[min(start + each, len(every)) - 1]))",
        ),
    ),
    *rules(
        "aorta.analysis.collective_matching",
        _MATCHING,
        (
            "a rank's own word on its group is overruled",
            "if key not in known and len(groups) == 1:",
            "if len(groups) == 1:",
        ),
        equivalent="a rank that tells its group is in it: if one group only lists the rank, it is that one",
    ),
    *rules(
        "aorta.analysis.frames",
        _MATCHING,
        ("bus bandwidth of the table is of all ranks", "* (size - 1) / size", "* size / size"),
        (
            "bandwidth of the table is in GiB",
            'frame["bytes"] / 1e9 / transfer_s',
            'frame["bytes"] / 2**30 / transfer_s',
        ),
    ),
    *rules(
        "aorta.analysis.bandwidth",
        _ACROSS,
        ("an all-reduce moves its bytes once", '{"allreduce": 2.0, ', '{"allreduce": 1.0, '),
        ("a reduce-scatter moves its bytes twice", '"reducescatter": 1.0', '"reducescatter": 2.0'),
        ("an all-to-all has no bus bandwidth", ', "alltoall": 1.0}', "}"),
        ("bus bandwidth is of all ranks", "factor * (ranks - 1) / ranks", "factor * ranks / ranks"),
        ("a group of one has a bandwidth", "return GROUP_OF_ONE if ranks == 1 else None", "return None"),
        ("no bytes are a bandwidth of 0", "    if size_bytes == 0:\n        return NO_BYTES\n", ""),
        (
            "bandwidth is in GiB",
            "size_bytes / transfer_ns[transfer_ns > 0]",
            "size_bytes / 1.073741824 / transfer_ns[transfer_ns > 0]",
        ),
    ),
    *rules(
        "aorta.analysis.collective_metrics",
        _ACROSS,
        ("the skew is the longest duration", "(longest_ns - transfer_ns) / NS_PER_MS", "longest_ns / NS_PER_MS"),
        (
            "the skew's bound is the skew",
            'counted.values["arrival_skew_bound_ms"].append(longest_ns / NS_PER_MS)',
            'counted.values["arrival_skew_bound_ms"].append((longest_ns - transfer_ns) / NS_PER_MS)',
        ),
        ("warm-up counts", "mine = found.used & (found.key == index)", "mine = found.key == index"),
        (
            "unknown collectives have a transfer of 0",
            "        clear = mine & (found.reason == OK)\n",
            "        clear = mine\n",
        ),
        (
            "rows of the warm-up count",
            "each = ((int(index), used & (of_row == index))",
            "each = ((int(index), of_row == index)",
        ),
    ),
    *rules(
        "aorta.analysis.collective_metrics",
        _AGGREGATE,
        (
            "an end that the caller checked is exact",
            '"transfer_is_upper_bound": "wait" in counted.sources',
            '"transfer_is_upper_bound": False',
        ),
    ),
    *rules(
        "aorta.analysis.expert_load",
        _EXPERTS,
        ("twice the mean of its block is not hot", '["times_mean"] < HOT_TIMES:', '["times_mean"] <= HOT_TIMES:'),
        ("any expert is hot", "HOT_TIMES: Final = 2.0", "HOT_TIMES: Final = 1.4"),
        ("a hundred tokens are few", '["mean_tokens"] < MIN_TOKENS:', '["mean_tokens"] <= MIN_TOKENS:'),
        ("an expert is on one rank of a mesh of two dimensions", "run.source.world_size, parts)", "owner + 1, parts)"),
    ),
    *rules(
        "aorta.analysis.load.record_columns",
        _EXPERTS,
        ("tokens of the warm-up count", "if experts and not line.warmup:", "if experts:"),
    ),
    *rules(
        "aorta.analysis.straggler",
        _STRAGGLER,
        (
            "15 collectives are evidence",
            "    if collectives < MIN_COLLECTIVES:\n",
            "    if collectives < MIN_COLLECTIVES - 1:\n",
        ),
        (
            "16 collectives are no evidence",
            "    if collectives < MIN_COLLECTIVES:\n",
            "    if collectives <= MIN_COLLECTIVES:\n",
        ),
        ("three quarters of the collectives are enough", "LAST_SHARE: Final = 0.8", "LAST_SHARE: Final = 0.75"),
        (
            "four fifths of the collectives are not enough",
            "    if share < LAST_SHARE:\n        return found | {\n",
            "    if share <= LAST_SHARE:\n        return found | {\n",
        ),
        ("0.1 ms are late", "MARGIN_MS: Final = STALL_CUTOFF_NS / NS_PER_MS", "MARGIN_MS: Final = 0.1"),
        ("a twentieth of the transfer is late", "MARGIN_SHARE: Final = 0.1", "MARGIN_SHARE: Final = 0.05"),
        ("late by the margin is late", "    if margin <= needed:\n", "    if margin < needed:\n"),
        ("the transfer does not matter", "- own, max(margin_ms, MARGIN_SHARE * transfer_ms)", "- own, margin_ms"),
        ("the least wait does not matter", "- own, max(margin_ms, MARGIN_SHARE", "- own, max(0.0, MARGIN_SHARE"),
        (
            "one peer that waits long is enough",
            "margin, needed = others[0][0] - own, ",
            "margin, needed = others[-1][0] - own, ",
        ),
        (
            "lateness is what the peers wait",
            "float(np.median([median for median, _ in others])) - own}",
            "float(np.median([median for median, _ in others]))}",
        ),
        (
            "lateness is that of the nearest peer",
            "float(np.median([median for median, _ in others])) - own}",
            "others[0][0] - own}",
        ),
        ("in a tie somebody was the last", "last = found.whole & found.alone", "last = found.whole"),
        (
            "waits of the warm-up count",
            "known = wait_ns[used & (group == number) & (wait_ns >= 0)]",
            "known = wait_ns[(group == number) & (wait_ns >= 0)]",
        ),
        (
            "waits that are not known count",
            "known = wait_ns[used & (group == number) & (wait_ns >= 0)]",
            "known = wait_ns[used & (group == number)]",
        ),
    ),
    *rules(
        "aorta.analysis.stats",
        ("tests/analysis/test_stats.py", *_AGGREGATE),
        (
            "the spread of ranks is of all values",
            '"rank_spread": max(known) - min(known) if enough',
            '"rank_spread": float(numbers[5] - numbers[4]) if numbers is not None and enough',
        ),
        ("the spread of one rank is 0", "        enough = len(known) > 1\n", "        enough = len(known) > 0\n"),
        (
            "the first reason stands for all",
            "max(reasons, key=reasons.__getitem__)",
            "min(reasons, key=reasons.__getitem__)",
        ),
        ("nulls are not counted", "return entry(count, len(column) - count, ", "return entry(count, 0, "),
        ("ranks must come in order", "    if np.any(ranks[1:] < ranks[:-1]):\n", "    if False:\n"),
        (
            "percentiles are the nearest values",
            'np.percentile(values, PERCENTILES, method="linear")',
            'np.percentile(values, PERCENTILES, method="nearest")',
        ),
        ("p5 is p10", "PERCENTILES: Final = (5, 50, 95)", "PERCENTILES: Final = (10, 50, 95)"),
    ),
    *rules(
        "aorta.analysis.aggregate",
        _AGGREGATE,
        (
            "steps that a rank lacks are job steps",
            "return by_step.max()[by_step.count() == len(ranks)]",
            "return by_step.max()",
        ),
        ("the job step is the fastest rank's", "return by_step.max()[", "return by_step.min()["),
        (
            "warm-up is used",
            "self.run.over_ranks(lambda steps: steps.used)",
            "self.run.over_ranks(lambda steps: np.ones(len(steps), bool))",
        ),
        ("a missing rank leaves job steps", "    if health.ranks_missing:\n", "    if False:\n"),
        (
            "a sum takes the part where the whole is null",
            "known = ~(np.isnan(part) | np.isnan(whole))",
            "known = ~np.isnan(part)",
        ),
        (
            "a sum takes the whole where the part is null",
            "    known = ~(np.isnan(part) | np.isnan(whole))\n    total = float(whole[known].sum())\n",
            "    known = ~np.isnan(part)\n    total = float(np.nansum(whole))\n",
        ),
        (
            "a ratio of sums over 0 is 0",
            "float(part[known].sum()) / total if total else None",
            "float(part[known].sum()) / total if total else 0.0",
        ),
        (
            "a mean takes nulls as 0",
            "        known = known[~np.isnan(known)]\n        keys",
            "        known = np.nan_to_num(known)\n        keys",
        ),
    ),
    *rules(
        "aorta.analysis.baselines",
        _BASELINES,
        (
            "the wall time is the fastest rank's",
            "return max(float(np.median(_steps_of(run, rank, phase).wall_ns))",
            "return min(float(np.median(_steps_of(run, rank, phase).wall_ns))",
        ),
        ("the saving is of the longer", "    shorter = min(compute, comm)\n", "    shorter = max(compute, comm)\n"),
        ("the least share is a third", "LEAST_SHARE: Final = 0.02", "LEAST_SHARE: Final = 0.3"),
        ("a slowdown is not less 1", "return overlapped / isolated - 1", "return overlapped / isolated"),
        (
            "incomplete coverage is busy time",
            "known = steps.compute_ms[complete & ~np.isnan(steps.compute_ms)]",
            "known = steps.compute_ms[~np.isnan(steps.compute_ms)]",
        ),
        (
            "isolated steps of any phase count",
            "used = ~isolated.warmup & (isolated.phase == PHASES.index(phase))",
            "used = ~isolated.warmup",
        ),
        (
            "isolated warm-up counts",
            "used = ~isolated.warmup & (isolated.phase == PHASES.index(phase))",
            "used = isolated.phase == PHASES.index(phase)",
        ),
        ("warm-up of training counts", "        used = steps.used\n", "        used = np.ones(len(steps), bool)\n"),
    ),
)
