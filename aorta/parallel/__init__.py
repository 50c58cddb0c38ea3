"""How a model is spread over ranks, with overlap and without."""
