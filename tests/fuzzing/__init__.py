"""`scripts/fuzz`: whatever takes a file from elsewhere, given files that nobody would write on purpose.

    scripts/fuzz --minutes 2                       # every door of `doors.py`, with a seed of its own
    scripts/fuzz --only merge --seed 7             # one door, the same cases every time
    scripts/fuzz --repeat artifacts/fuzz/merge-1a2b3c4d   # one finding again, with its traceback

A *door* is an entry into AORTA: its seeds are good and odd inputs of the tests (`seeds.py`), which are changed at
random (`mutations.py`) and given to it in a process with limits (`worker.py`). It answers, or it refuses
with an error of `aorta/errors.py`. Everything else is a finding: another exception, more than 1 GiB, more than 10 s,
a changed input, a file where none was asked for, or torch loaded by what must not load it.
"""
