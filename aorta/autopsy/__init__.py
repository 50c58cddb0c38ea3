"""Why a job hangs: evidence of each rank, the rules that accuse, and the report. Must not import torch."""
