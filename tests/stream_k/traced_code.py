"""What kernels become with tracing off, with marks taken out, and with tracing on. For a fresh process each, since a
kernel is compiled once a process; importing this imports no Triton."""

from typing import Any

from tests.compile import worker
from tests.compile.cases import Case

CASES = (
    Case("gemm", changes=(("split", "none"),), hot=True),
    Case("gemm_all_reduce", hot=True),
    Case("gemm_reduce_scatter", hot=True),
    Case("all_gather_gemm", hot=True),
    Case("all_reduce", arguments=(("algorithm", "two_shot"),), hot=True),
)


class _NoRecorder:
    """Kernels get their events from here when they are compiled; nothing runs."""

    def __init__(self) -> None:
        import torch

        self.sample = torch.zeros(1 << 20, dtype=torch.int64)

    def events(self, launch: object) -> Any:
        return self.sample

    def copy(self, to: object, source: object) -> None:
        pass


def compile_all(how: str, target: str, cache: str) -> list[tuple[str, str, int, int, int]]:
    """(kernel, normal text, registers, spills, shared memory) of each kernel of CASES. how: "off", "unmarked" (marks
    do nothing at all) or "on"."""
    worker.prepare(False, cache)
    from pyrocshmem import trace

    if how == "unmarked":
        from tests.stream_k import unmarked

        trace.mark = unmarked.mark_nothing
    if how == "on":
        with trace.recording(_NoRecorder()):
            found = [kernel for case in CASES for kernel in worker.compile_case(case, target)]
    else:
        found = [kernel for case in CASES for kernel in worker.compile_case(case, target)]
    # From the first .file on there are only names and lines of the source.
    return [(x.kernel, x.normal().split("\n.file")[0], x.registers, x.spills, x.shared) for x in found]
