"""What a kernel became on a GPU that need not be here: PTX or GCN assembly as text, and what it takes."""

import functools
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """One kernel on one target.

    target: its name. kernel: the function's. constants: its constants, as text. text: the assembly. shared_memory:
    bytes of a program (on AMD: LDS). registers: 32-bit ones of a thread. spills: of a thread, on NVIDIA bytes of stack
    and local memory, on AMD vector registers. num_warps: of a program. programs: of the launch. cubin: what NVIDIA's
    assembler made; nothing on AMD. ttgir: Triton's intermediate code.
    """

    target: str
    kernel: str
    constants: dict[str, str]
    text: str = field(repr=False)
    shared_memory: int
    registers: int
    spills: int
    num_warps: int = 4
    programs: int = 1
    cubin: bytes = field(default=b"", repr=False)
    ttgir: str = field(default="", repr=False)

    @classmethod
    def of(cls, target: str, constants: dict[str, Any], compiled: Any, programs: int) -> "Compiled":
        """From Triton's compiled kernel."""
        if target.startswith("gfx"):
            text, cubin = compiled.asm["amdgcn"], b""
            usage = {
                name: int(value)
                for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)
            }
            registers, spills = usage["vgpr_count"], usage["vgpr_spill_count"]
        else:
            text, cubin = compiled.asm["ptx"], compiled.asm["cubin"]
            registers, spills = resources(cubin)
        shown = {name: getattr(value, "__name__", str(value)) for name, value in constants.items()}
        used = compiled.metadata.shared, registers, spills, compiled.metadata.num_warps, programs
        return cls(target, compiled.name, shown, text, *used, cubin, compiled.asm["ttgir"])

    @property
    def nvidia(self) -> bool:
        """Whether the text is PTX."""
        return self.target.startswith("sm_")

    def machine_code(self) -> str:
        """What NVIDIA's assembler made of the text (SASS)."""
        return _cuobjdump(self.cubin, "-sass")

    def normal(self) -> str:
        """The text without indentation, empty lines and remarks on source lines."""
        lines = (line.strip() for line in self.text.splitlines())
        remarks = (".loc", "//", ".Ltmp", "$L__tmp", "; %bb")
        return "\n".join(line for line in lines if line and not line.startswith(remarks))

    def count(self, pattern: str) -> int:
        """How often a regular expression occurs in the normal text."""
        return len(re.findall(pattern, self.normal()))


@functools.lru_cache(maxsize=4)
def resources(cubin: bytes) -> tuple[int, int]:
    """(registers, bytes of stack and local memory) of the one kernel in `cubin`."""
    listing = _cuobjdump(cubin, "-res-usage")
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _cuobjdump(cubin: bytes, option: str) -> str:
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
