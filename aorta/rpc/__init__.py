"""Calls between processes: tracing them (`tracer`), and the runs of `workload=rpc`. Of one's own code:

with aorta.rpc.tracer.TracedRpc() as traced:  # on every worker
...
"""
