"""Several independent launches of one configuration against several of another: what may be said of the difference.

Enters: folders that hold run folders. Leaves: effects with intervals, p-values and verdicts. Must not: take a step for
an independent observation (docs/measuring.md, section 5).
"""
