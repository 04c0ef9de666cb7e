"""What the server that forks the ranks of tests has loaded beforehand: what each rank would otherwise load anew, for
0.1 to 1 s, and the kernels as the interpreter reads them.
"""

import atexit
import gc
import sys

from pyrocshmem import stream_k  # noqa: F401 (before Triton)

from triton.runtime.interpreter import InterpretedFunction  # isort: skip

import pytest  # noqa: F401
import torch._dynamo  # noqa: F401
import triton.experimental.gluon  # noqa: F401 (by the first launch of a kernel)

import tests.fused.bodies  # noqa: F401
from pyrocshmem.benchmarks import run  # noqa: F401

PACKAGES = ("pyrocshmem", "triton")


def read_kernels() -> None:
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES]
    functions = [value for module in modules for value in vars(module).values()]
    for function in {id(value): value for value in functions}.values():
        if isinstance(function, InterpretedFunction):
            function.rewrite()


read_kernels()
# A rank that collects garbage looks through its own objects alone, and copies no page of these for it: a tenth of a
# second and more each time.
gc.freeze()
# At the end of the server all is looked through, and what extensions call a leak is none.
atexit.register(gc.unfreeze)
