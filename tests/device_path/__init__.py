"""The device path on the simulated device (`tests.simulated`): what it measures, keeps and costs.

It runs in virtual time, where the device's own timeline is an exact witness whatever the machine's load.
"""
