"""RMSNorm over processes that torchrun starts: torchrun --nproc-per-node 4 examples/rms/torchrun.py

Exits with 1 when any rank's result is wrong, with 2 when torchrun did not start it.
"""

from common import Hidden, Rows, check_rank, finish

from pyrocshmem import from_torchrun, options


def main(rows: Rows = 16, hidden: Hidden = 1001) -> None:
    """Check mixed-precision RMSNorm on the processes of torchrun."""
    try:
        from_torchrun()
    except ValueError as error:
        options.refuse(error)
    finish(check_rank(None, rows, hidden))


if __name__ == "__main__":
    options.run(main)
