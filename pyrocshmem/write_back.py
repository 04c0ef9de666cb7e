"""What a release on AMD must do first: write back the L2 of the program's die, and wait until that is done.

A release is `buffer_wbl2`, a wait for it, and the atomic. LLVM took the write-back for an instruction that is not
waited for until https://github.com/llvm/llvm-project/pull/178316 (February 2026): where nothing else was under way,
which is so behind every barrier, it left out the wait. The flag then may be seen before the data.
"""

import triton
import triton.language as tl
from triton.language import target_info

from pyrocshmem import target
from pyrocshmem.versions import version_of

# 3.9 has an LLVM that waits by itself.
_MUST_WAIT = tl.constexpr(not target.interpreted() and version_of(triton.__version__) < (3, 9))


@triton.jit
def write_back(scope: tl.constexpr):
    """Every write of this thread, and those that barriers have brought in, can be seen at `scope`, "gpu" or "sys"."""
    if _MUST_WAIT and target_info.is_hip():
        BITS: tl.constexpr = "sc0 sc1" if scope == "sys" else "sc1"
        tl.inline_asm_elementwise(
            "buffer_wbl2 " + BITS + "\ns_waitcnt vmcnt(0)", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
