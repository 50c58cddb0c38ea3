"""Where a difference in exposed communication lies: which collective, where in the step, on which rank, and why."""
