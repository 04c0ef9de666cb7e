"""The ops of this project done the ordinary way: torch.matmul, then a torch.distributed collective.

`reference.ops` has the ops (over NCCL, RCCL or gloo), `reference.accuracy` the bound that every GEMM is held
to, `reference.report` the printing; `python -m pyrocshmem reference`, or `reference/run.sh`, runs one of them on this
machine and says how right and how fast it is.
"""

if __name__ != "pyrocshmem.reference":
    raise ImportError(
        "this is pyrocshmem.reference: import it by that name, since modules of two names would be two modules"
    )
