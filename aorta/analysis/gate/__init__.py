"""Decides whether a candidate may pass: conditions on the metrics of a comparison, with results for people and CI
systems.
"""
