"""How a run is seen: the seam every collective passes, compute ranges, stalls, clocks, and the steps made of them."""
