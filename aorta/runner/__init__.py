"""A run of one rank: recorded the same way whether AORTA trains, or somebody else's loop does.

`recorded_run` is the one place where a run is wired; `train` and `api` are its two users here.
"""
