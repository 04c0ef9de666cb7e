"""What the device examples share: their command line, and a line about how each rank ended."""

import argparse
import sys
from collections.abc import Callable

import pyrocshmem


def run(rank_main: Callable[..., None], *switches: str) -> None:
    """Start `rank_main(rank, world_size, *whether each of the switches is given)` in processes; exits with 1 when one
    fails, with 2 for bad options."""
    parser = argparse.ArgumentParser(description=sys.modules[rank_main.__module__].__doc__)
    parser.add_argument("-n", "--ranks", type=int, default=4, help="processes, 1 to 8; by default 4")
    for switch in switches:
        parser.add_argument(f"--{switch}", action="store_true")
    options = parser.parse_args()
    try:
        if not 1 <= options.ranks <= 8:
            raise ValueError(f"{options.ranks} ranks, allowed are 1 to 8")
        ends = pyrocshmem.run_ranks(
            rank_main, options.ranks, *(getattr(options, switch) for switch in switches)
        )
    except ValueError as error:
        parser.error(str(error))
    print("\n".join(f"rank {end.rank}: {'right' if end.ok else end.exception}" for end in ends))
    sys.exit(0 if all(end.ok for end in ends) else 1)
