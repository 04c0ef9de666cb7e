"""RMSNorm over ranks that are threads of one process and share its memory: python examples/rms/threads.py -n 4

On GPUs thread r has GPU r; on a CPU the threads' kernels take turns. Exits with 1 when any rank's result is wrong.
"""

import typer
from common import Hidden, Ranks, Rows, check_rank, default_ranks, print_findings

from pyrocshmem import options, spawn_threads


def main(ranks: Ranks = None, rows: Rows = 16, hidden: Hidden = 1001) -> None:
    """Check mixed-precision RMSNorm on threads of one process."""
    of_ranks = spawn_threads(check_rank, default_ranks(ranks), rows, hidden)
    raise typer.Exit(0 if print_findings(of_ranks) else 1)


if __name__ == "__main__":
    options.run(main)
