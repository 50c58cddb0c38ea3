"""Rules of comparing launches: the statistics, the verdicts, what is alike, and how runs become numbers."""

from __future__ import annotations

from typing import Final

from tests.mutation.mutant import rules

_LAUNCHES = ("tests/analysis/compare/test_launch_comparison.py",)
_VERDICT = ("tests/analysis/compare/test_verdict.py",)
_RANKS = ("tests/analysis/compare/test_ranks.py",)
_POWER = ("tests/analysis/compare/test_power.py",)
_BOOTSTRAP = ("tests/analysis/compare/test_bootstrap.py",)
_PAIRS = ("tests/analysis/test_compare.py", "tests/analysis/compare/test_comparability.py")
_JUDGED = ("tests/analysis/compare/test_metric_verdicts.py",)
_EFFECT = ("tests/analysis/compare/test_effect.py",)
_ALIKE = ("tests/analysis/compare/test_comparability.py",)
_SETS = ("tests/analysis/compare/test_sets.py",)

COMPARISON: Final = (
    *rules(
        "aorta.analysis.compare.verdict",
        _VERDICT,
        ("a p of alpha is not significant", "evidence.p <= evidence.alpha", "evidence.p < evidence.alpha"),
        ("an effect of the margin is beyond it", "abs(effect.value) > margin", "abs(effect.value) >= margin"),
        ("only effects upwards are beyond the margin", "abs(effect.value) > margin", "effect.value > margin"),
        (
            "significance alone is enough",
            "    if significant and beyond and not effect.holds_zero:\n",
            "    if significant:\n",
        ),
        ("an interval that holds 0 is one of a difference", " and beyond and not effect.holds_zero:", " and beyond:"),
        (
            "the margin alone is enough",
            "    if significant and beyond and not effect.holds_zero:\n",
            "    if beyond:\n",
        ),
        (
            "more is always good",
            'good = (effect.value > 0) == (evidence.better == "higher")',
            "good = effect.value > 0",
        ),
        ("an interval that ends at the margin is not within", "effect.high <= margin:", "effect.high < margin:"),
        ("an interval that begins at the margin is not within", "-margin <= effect.low", "-margin < effect.low"),
        (
            "equivalence looks at one end of the interval",
            "-margin <= effect.low <= effect.high <= margin",
            "effect.high <= margin",
        ),
        ("the launches of one side are enough", "        if count < least\n", "        if max(launches) < least\n"),
        (
            "a step longer by the margin withholds",
            '    if value <= guard["margin"]:\n',
            '    if value < guard["margin"]:\n',
        ),
        (
            "a longer step that may be chance does not withhold",
            '    if value <= guard["margin"]:\n',
            '    if value <= guard["margin"] or guard["p"] > alpha:\n',
        ),
        (
            "an unknown step time does not withhold",
            '        return "the step time is not known on both sides"\n',
            "        return None\n",
        ),
    ),
    *rules(
        "aorta.analysis.compare.verdict",
        _VERDICT,
        ("any alpha is taken", "if not 0 < self.alpha <= 0.5:", "if not 0 < self.alpha <= 1:"),
        ("an alpha of a half is refused", "if not 0 < self.alpha <= 0.5:", "if not 0 < self.alpha < 0.5:"),
        ("a margin of 0 is taken", "if not 0 < self.margin < 1:", "if not 0 <= self.margin < 1:"),
        ("a margin of 1 is taken", "if not 0 < self.margin < 1:", "if not 0 < self.margin <= 1:"),
        ("what has no better direction can be primary", " or metric_named(self.primary).better is None:", ":"),
        ("a key's first letters allow it", 'name.startswith(f"{word}.")', "name.startswith(word)"),
        ("a key is allowed only whole", ' or name.startswith(f"{word}.")', ""),
        ("the guard is secondary", '"guard" if name == GUARD else "sequence"', '"sequence"'),
        ("the primary is not the first of the sequence", "(self.primary, *SEQUENCE)", "(*SEQUENCE, self.primary)"),
    ),
    *rules(
        "aorta.analysis.compare.verdict",
        _EFFECT,
        ("the interval is one of 90 %", "LEVEL: Final = 0.95", "LEVEL: Final = 0.90"),
    ),
    *rules(
        "aorta.analysis.compare.metric_verdicts",
        _JUDGED,
        (
            "the guard withholds the primary's improvement only",
            'if entry["verdict"] == "improvement" and name != GUARD',
            'if entry["verdict"] == "improvement" and entry["role"] == "primary"',
        ),
        (
            "a slower step withholds nothing",
            "    withheld = slower(metrics.get(GUARD), rules.alpha)\n",
            "    withheld = None\n",
        ),
        ("step time withholds though it is primary", "    if rules.primary == GUARD:\n        return\n", ""),
        ("constants are tested", ' and not entry["constant"] and', " and"),
        (
            "the sequence and the guard are tested with the others",
            'if entry["role"] == "secondary" and _is_tested',
            "if _is_tested",
        ),
        (
            "no secondary metric is corrected",
            'entry["p"] if entry["p_corrected"] is None else entry["p_corrected"]',
            'entry["p"]',
        ),
        ("the sequence never stops", 'elif tested and entry["p"] > rules.alpha:', "elif False:"),
        (
            "the sequence stops at a small effect too",
            'elif tested and entry["p"] > rules.alpha:',
            'elif tested and entry["verdict"] not in _DECIDED:',
        ),
        (
            "what cannot be decided is inconclusive",
            "        if found.level is None:\n",
            "        if False:\n",
        ),
        (
            "the interval beside others is that of one alone",
            'intervals(name, left, right, entry["p"], found.level)',
            'intervals(name, left, right, entry["p"], rules.alpha)',
        ),
        ("across platforms everything is judged", ' and entry["judgement"] != "not judged" and', " and"),
        (
            "constants of too few launches are equivalent",
            "        lacking = too_few(launches, rules.alpha)\n",
            "        lacking = None\n",
        ),
    ),
    *rules(
        "aorta.analysis.compare.metric_verdicts",
        _JUDGED,
        (
            "the guard withholds its own improvement",
            " and name != GUARD and withheld is not None:",
            " and withheld is not None:",
        ),
        equivalent="a step time that improved did not get longer: it withholds nothing",
    ),
    *rules(
        "aorta.analysis.compare.rank_tests",
        ("tests/analysis/compare/test_min_p.py",),
        (
            "every metric is held against the smallest p of all",
            "float((smallest[step] <= observed).mean())",
            "float((smallest[0] <= observed).mean())",
        ),
        ("adjusted p may fall", "max(adjusted, observed, float(", "max(observed, float("),
        ("the level goes on behind the first that is no finding", "        if adjusted <= alpha:", "        if True:"),
        ("what nothing could decide has a level", "None if level < least else level", "level"),
        ("a p that too many labellings reach is low enough", "critical * _BELOW", "critical"),
        (
            "the observed labelling is drawn as well",
            "labels[1:] = generator.permuted(labels[1:], axis=1)",
            "labels[:] = generator.permuted(labels, axis=1)",
        ),
        (
            "two launches too few do for alpha",
            "metrics * 2 / comb(2 * size, size) > alpha",
            "metrics / comb(2 * size, size) > alpha",
        ),
    ),
    *rules(
        "aorta.analysis.compare.rank_tests",
        _VERDICT,
        ("one launch more than alpha needs", "comb(2 * size, size) > alpha:", "comb(2 * size, size) >= alpha:"),
    ),
    *rules(
        "aorta.analysis.compare.effects",
        ("tests/analysis/compare/test_shifts.py",),
        (
            "a quotient is not less 1",
            "return candidate / reference - 1 if reference else None",
            "return candidate / reference if reference else None",
        ),
        (
            "the effect is the reference's",
            "        return candidate - reference\n",
            "        return reference - candidate\n",
        ),
        ("the interval is one pair too wide", "float(ordered[rejected - 1])", "float(ordered[rejected - 2])"),
        ("what is not rejected may lie outside", "*([0.0] if p > level else [])", ""),
        ("the effect may lie outside", "held = [*ends, value, ", "held = [*ends, "),
    ),
    *rules(
        "aorta.analysis.compare.rank_tests",
        _RANKS,
        ("ties are taken for order", "    if len(np.unique(values)) < len(values):\n", "    if False:\n"),
        ("U counts ties", "(candidate[:, None] > reference).sum()", "(candidate[:, None] >= reference).sum()"),
        ("with ties p is one-sided", "2 * np.minimum(at_most, at_least)", "np.minimum(at_most, at_least)"),
        ("a launch without a value is the first", "int(known.sum()) + 1)", "0)"),
        (
            "a p of alpha is not critical",
            "np.flatnonzero(found[half:] <= alpha)",
            "np.flatnonzero(found[half:] < alpha)",
        ),
        ("the critical U is one too many", "return half + int(enough[0])", "return half + 1 + int(enough[0])"),
        ("many launches are exact as well", '"exact" if pairs <= EXACT_UP_TO', '"asymptotic" if pairs <= EXACT_UP_TO'),
    ),
    *rules(
        "aorta.analysis.compare.effects",
        _POWER,
        ("the deviation is biased", "return sqrt(squares / freedom) / c4", "return sqrt(squares / freedom)"),
        (
            "the deviation has no freedom taken off",
            "freedom = len(reference) + len(candidate) - 2",
            "freedom = len(reference) + len(candidate) - 1",
        ),
        ("what is detectable ignores the margin", "np.maximum(sd * by_test, margin + sd * by_median)", "sd * by_test"),
        ("what is detectable has even odds", "POWER: Final = 0.8", "POWER: Final = 0.5"),
        ("a shift downwards needs no launches", "<= abs(shift))", "<= shift)"),
        (
            "one launch fewer is enough",
            "return sizes[place] if place < len(sizes) else None",
            "return sizes[place] - 1 if place < len(sizes) else None",
        ),
        (
            "no number of launches is too many",
            "return sizes[place] if place < len(sizes) else None",
            "return sizes[min(place, len(sizes) - 1)]",
        ),
    ),
    *rules(
        "aorta.analysis.compare.metric_verdicts",
        _EFFECT,
        (
            "the noise of launches is not relative to the reference",
            "    relative = sd / scale\n",
            "    relative = sd\n",
        ),
        (
            "the noise of a ratio is relative",
            'scale = 1.0 if estimate["kind"] == "difference" else abs(',
            "scale = 1.0 if False else abs(",
        ),
        (
            "what is detectable is in milliseconds",
            "detectable(len(left), len(right), relative, ",
            "detectable(len(left), len(right), sd, ",
        ),
        (
            "launches needed are for the observed effect, however small",
            'launches_needed(max(abs(estimate["value"]), rules.margin), ',
            'launches_needed(abs(estimate["value"]), ',
        ),
        (
            "a secondary metric states a power that it does not have",
            '    if rules.role(name) == "secondary":\n',
            "    if False:\n",
        ),
        (
            "ratios are compared by their quotient",
            '"difference" if metric_named(name).unit == "ratio" else "quotient"',
            '"quotient"',
        ),
        (
            "launches without a value count",
            '"launches": {"reference": len(left), "candidate": len(right)}',
            '"launches": {"reference": len(reference), "candidate": len(candidate)}',
        ),
        (
            "the interval of the difference is that of the effect",
            'apart = estimated("difference", ',
            "apart = estimated(_kind(name), ",
        ),
    ),
    *rules(
        "aorta.analysis.compare.effects",
        _BOOTSTRAP,
        ("the interval is one-sided", "[50 * (1 - level), 50 * (1 + level)]", "[100 * (1 - level), 100 * level]"),
        (
            "steps are not resampled",
            "    launches = generator.integers(len(pools), size=(RESAMPLES, len(pools)))\n    inner = generator.integers(0, sizes[launches])\n",
            "    launches = generator.integers(len(pools), size=(RESAMPLES, len(pools)))\n    inner = np.zeros_like(launches)\n",
        ),
        (
            "launches are not resampled",
            "launches = generator.integers(len(pools), size=(RESAMPLES, len(pools)))",
            "launches = np.tile(np.arange(len(pools)), (RESAMPLES, 1))",
        ),
        (
            "ranks of a step are drawn apart",
            "_, cluster = np.unique(steps, return_inverse=True)",
            "cluster = np.arange(len(steps))",
        ),
        (
            "a weighted median is the upper one",
            "(ordered[lower] + ordered[upper]) / 2",
            "(ordered[upper] + ordered[upper]) / 2",
        ),
    ),
    *rules(
        "aorta.analysis.compare.launch_comparison",
        _ALIKE,
        (
            "a side may mix settings of its strategy",
            " or (key.startswith(_ONE_SIDE) and not key.endswith(_VARIES)):",
            ":",
        ),
        ("a side must share its seed", " and not key.endswith(_VARIES)", ""),
        (
            "launches of a side are not compared",
            "            for difference in differing(first.facts, other.facts):\n",
            "            for difference in ():\n",
        ),
        (
            "the first launch is the yardstick though it knows nothing",
            "next((launch for launch in side.launches if launch.tells_configuration), side.launches[0])",
            "side.launches[0]",
        ),
    ),
    *rules(
        "aorta.analysis.compare.run_comparison",
        _PAIRS,
        (
            "a key that one side lacks does not differ",
            "        if left.get(key, ABSENT) != right.get(key, ABSENT)\n",
            "        if key in left and key in right and left[key] != right[key]\n",
        ),
        (
            "a missing key of the workload is alike",
            'if key.startswith("config.parallel.") and ABSENT in',
            "if ABSENT in",
        ),
        (
            "a setting that only one strategy has changes the work",
            '    if key.startswith("config.parallel.") and ABSENT in (difference["reference"], difference["candidate"]):\n        return False',
            "    if False:\n        return False",
        ),
        ("another world size is the same work", "return None not in (", "return False and None not in ("),
        ("an unknown world size is another one", "return None not in (", "return True or None not in ("),
        ("another precision is the same work", '("dtype", "precision", "batch_size"', '("dtype", "batch_size"'),
        (
            "milliseconds of two platforms are judged",
            "return None if left == right else ACROSS_PLATFORMS",
            "return None",
        ),
        (
            "ratios of two platforms are not judged",
            '    elif metric.unit != "ratio" and not_judged is not None:\n',
            "    elif not_judged is not None:\n",
        ),
        (
            "unknown platforms are alike",
            "    if left is None or right is None:\n        return _PLATFORM_UNKNOWN\n",
            "",
        ),
        ("more is better", '(values["difference"] > 0) == (metric.better == "higher")', 'values["difference"] > 0'),
        (
            "a quotient over 0 is 0",
            "quotient = right / left if left and right is not None else None",
            "quotient = right / left if left and right is not None else 0.0",
        ),
        (
            "collectives are matched without their bytes",
            'key_names = ("kind", "group", "group_size", "bytes")',
            'key_names = ("kind", "group", "group_size")',
        ),
        (
            "where a run writes is a difference",
            "    configuration.pop(_WHERE, None)",
            "    configuration.pop('', None)",
        ),
        (
            "a side without configuration differs in every key of the other",
            "    if any(all(key.startswith(HEADER) for key in side) for side in (left, right)):\n",
            "    if False:\n",
        ),
    ),
    *rules(
        "aorta.analysis.compare.launch_set",
        _SETS,
        (
            "an incomplete launch counts",
            "    return None if dataset.used.any() else NOTHING_USED\n",
            "    return None\n",
        ),
        ("a launch with missing ranks counts", "    if health.ranks_missing:\n", "    if False:\n"),
        ("a launch with a killed rank counts", "        if ending != COMPLETED:\n", "        if False:\n"),
        ("one run counts twice", "if why is None and run_id in seen:", "if False:"),
        (
            "only the last metric chooses the representative",
            "distances[place] += math.inf",
            "distances[place] = math.inf",
        ),
        (
            "a launch that cannot be read ends the comparison",
            "            left_out.append((folder, str(error)))\n            continue\n",
            "            raise\n",
        ),
    ),
    *rules(
        "aorta.analysis.compare.launch_set",
        _SETS,
        (
            "nulls are values",
            "    values, steps = values[known], steps[known]\n",
            "    values, steps = np.nan_to_num(values), steps\n",
        ),
        ("a launch is its mean", "return Sample(float(np.median(values)), ", "return Sample(float(np.mean(values)), "),
    ),
)
