"""Compares two sides: single runs (`run_comparison`), or sets of independent launches, with effects and verdicts.

Must not: treat a step as an independent observation (docs/dev/measuring.md, section 5).
"""
