"""Many Chrome traces, one a rank -> one file for Perfetto, on one clock, checked against causality.

Streams: never more than one event of one trace is in memory. No torch, no pandas
(docs/decisions/0011-merged-trace.md).
"""
