"""Launches as processes: started, marked, waited for, stopped, and nothing of them left behind.

Enters: a command line. Leaves: how it ended. Must not: know what a plan or a sweep is, or load torch.
"""
