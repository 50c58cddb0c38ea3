"""Compares several independent launches of one configuration with several launches of another.

Takes two folders of run folders and gives effects with confidence intervals, p-values and verdicts. Must not: treat a
step as an independent observation (docs/measuring.md, section 5).
"""
