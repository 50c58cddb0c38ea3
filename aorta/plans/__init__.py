"""Repeats and A/B plans: independent launches of `train.py` in an interleaved order, each in a folder of its own.

Enters: what to launch, from a command line or a YAML file. Leaves: a plan folder with `plan.json`, `journal.jsonl`, one
run folder per launch, and for an A/A plan the noise floor. Must not: import torch (launches are other processes), or
judge a difference: `aorta.analysis` does.
"""
