"""From files to runs: what a run folder holds, and what is wrong with it. No pandas, no matplotlib, no torch."""
