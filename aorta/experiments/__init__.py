"""Experiments: independent launches of one side or many, in an interleaved order (`aorta ab`).

Must not import torch (launches are other processes), or judge a difference: `aorta.analysis` does.
"""
