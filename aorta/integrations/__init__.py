"""Callbacks for trainers that call the loop themselves; each module needs the framework that it is named after.

Importing this package imports nothing. Must not contain what a recording of any loop needs.
"""
