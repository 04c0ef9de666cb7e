"""Builds the C library of finegrained_alloc into the wheel, with this machine's C compiler; see also pyproject.toml.

An editable installation gets it beside its sources, where activate.sh keeps it up to date.
"""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.dist import Distribution
from setuptools.errors import ExecError

PACKAGE = Path(__file__).resolve().parent / "pyrocshmem" / "finegrained_alloc"


class BuildWithLibrary(build_py):
    """The Python files, then the library beside them."""

    def run(self) -> None:
        super().run()
        place = PACKAGE if self.editable_mode else Path(self.build_lib) / "pyrocshmem" / "finegrained_alloc"
        command = ["sh", str(PACKAGE / "build.sh"), str(place.resolve() / "libfinegrained_alloc.so")]
        if subprocess.run(command, check=False).returncode:
            raise ExecError(
                "could not build the C library finegrained_alloc (above); it needs a C compiler, such as gcc or clang "
                "(Debian and Ubuntu: apt-get install gcc libc6-dev); CC names another than cc"
            )


class BinaryDistribution(Distribution):
    """Of one kind of machine."""

    def has_ext_modules(self) -> bool:
        return True


class AnyPythonWheel(bdist_wheel):
    """Python loads the library with ctypes: any version of it can."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": AnyPythonWheel},
    distclass=BinaryDistribution,
)
