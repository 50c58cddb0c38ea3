"""Runs one rank, recorded the same way whether AORTA trains or the user's own loop does.

`recorded_run` is the one place where a run is wired; `train` and `api` use it here.
"""
