"""Mistakes that the checks of the assembly must find."""

import triton


@triton.jit
def settle_nothing():
    """In the place of `pyrocshmem.signal.settle`: no drain, no barrier."""
