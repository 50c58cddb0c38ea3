"""Clusters: what nodes without a shared disk wrote, collected into one run folder.

    python analysis/gather.py --into gathered node0:/scratch/run node1:/scratch/run

Enters: folders of nodes. Leaves: one run folder that the report reads. Must not: load torch, or change a file it reads.
"""
