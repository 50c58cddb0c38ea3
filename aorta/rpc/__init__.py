"""Remote procedure calls between processes: tracing them (`tracer`), and the runs of `workload=rpc`.

To trace your own code:

    with aorta.rpc.tracer.TracedRpc() as traced:  # on every worker
        ...
"""
