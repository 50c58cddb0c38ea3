"""May this candidate pass? Conditions on the metrics of a comparison, and their outcome for people and CI systems."""
