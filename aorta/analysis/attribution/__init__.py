"""Explains a difference in exposed communication: which collective, where in the step, on which rank, and why."""
