"""Experiments: many launches of `train.py`, and what they wrote brought together.

    plan    one side or many: independent launches in an interleaved order          aorta ab
    sweep   Hydra's multirun: one launch a job                                      aorta train -m

Plans and sweeps share the engine that starts launches (`launch_engine`, on `process`) and the journal.

Must not import torch (launches are other processes), or judge a difference: `aorta.analysis` does.
"""
