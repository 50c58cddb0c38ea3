"""Where a run happens: its ranks, process group, folder, manifest, and how all ranks end together."""
