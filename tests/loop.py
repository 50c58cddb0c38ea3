"""The runner's loop by hand, under the name that tests and benchmarks know."""

from aorta.runner.manual_loop import Loop, resolved

__all__ = ["Loop", "resolved"]
