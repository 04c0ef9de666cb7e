"""RMSNorm over processes that torchrun starts: torchrun --nproc-per-node 4 examples/rms/torchrun.py

Exits with 1 when any rank's result is wrong.
"""

import typer
from common import Hidden, Rows, check_rank, finish

from pyrocshmem import from_torchrun


def main(rows: Rows = 16, hidden: Hidden = 1001) -> None:
    """Check mixed-precision RMSNorm on the processes of torchrun."""
    from_torchrun()
    finish(check_rank(None, rows, hidden))


if __name__ == "__main__":
    typer.run(main)
