"""Experiments: many launches of `train.py`, and what they wrote brought together.

    plan    repeats, A/B and A/A: independent launches in an interleaved order      aorta ab
    sweep   Hydra's multirun: one launch a job, then a table and heat maps          aorta train -m

Plans and sweeps share the engine that starts launches (`launch_engine`, on `process`), the journal, the heat map.

Must not import torch (launches are other processes), or judge a difference: `aorta.analysis` does.
"""
