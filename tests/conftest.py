"""For all tests: what they start hears signals, also where a shell had them ignored (`nohup`, `&`).

A program starts with the signals ignored that its parent ignores, and many tests send one. A handler, even one that
does nothing, is not passed on: the tests themselves still ignore what they were told to ignore.

And before anybody imports torch: the simulated device, where AORTA_SIMULATED_DEVICE asks for it (`tests/simulated`).
"""

from __future__ import annotations

import signal

from tests.simulated import load

for number in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, lambda _number, _frame: None)

if load.wanted():
    load.load()
    load.for_children()
