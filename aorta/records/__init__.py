"""The record: what a run writes, one JSON Lines file a rank, and how it is read back. No torch, no pandas."""
