"""Distribution of a model over ranks, with overlap and without."""
