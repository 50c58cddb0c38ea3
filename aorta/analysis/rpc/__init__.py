"""An RPC run -> one table with every call and what it ran where, and one trace with arrows. No torch, no pandas."""
