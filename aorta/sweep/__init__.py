"""Sweeps: one launch a job, a journal of what became of each, a table and a heat map of their metrics.

    python train.py -m label=batch training.batch_size=4,8,16
    python analysis/sweep_report.py artifacts/batch

Enters: checked jobs (`aorta.config.multirun`). Leaves: `<sweep folder>/<NN>/`, a run folder each, and `sweep.jsonl`.
Must not: load torch, or pandas and matplotlib before a run is there to be read.
"""
