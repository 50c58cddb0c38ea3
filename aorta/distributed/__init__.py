"""The distributed side of a run: ranks, process group, output folder, manifest, and how all ranks end together."""
