"""What the server that forks the ranks of tests has loaded beforehand: the ops, and their kernels as the interpreter
reads them, which each rank would otherwise read anew, for 0.1 s.
"""

import sys

import stream_k  # noqa: F401 (before Triton)

from triton.runtime.interpreter import InterpretedFunction  # isort: skip

import tests.fused.bodies  # noqa: F401

PACKAGES = ("collectives", "pyrocshmem", "stream_k", "triton")


def read_kernels() -> None:
    modules = [module for name, module in sys.modules.items() if name.split(".")[0] in PACKAGES]
    functions = [value for module in modules for value in vars(module).values()]
    for function in {id(value): value for value in functions}.values():
        if isinstance(function, InterpretedFunction):
            function.rewrite()


read_kernels()
