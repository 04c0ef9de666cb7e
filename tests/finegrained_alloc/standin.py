"""Running children against standin_runtime.c, which takes the place of libamdhip64 and libcuda, and reading its log."""

from pathlib import Path
from typing import Any

from tests.finegrained_alloc import support

QUERIES = ("hipGetDeviceCount", "cuInit", "cuDeviceGetCount", "cuDevicePrimaryCtxRetain")
PREAMBLE = """
B = sys.argv[1]
standin = ctypes.CDLL(os.environ["PYROCSHMEM_HIP_LIBRARY"])
def state():
    # The driver API of CUDA keeps no last error.
    return dict(live=standin.standin_live(), device=standin.standin_device(), depth=standin.standin_depth(),
                sticky=standin.standin_sticky() if B == "hip" else 0)
"""


BALANCED = {"live": 0, "device": 0, "depth": 0, "sticky": 0}


class Standin:
    """Runs children against the stand-in and reads its log, without the queries that loading makes."""

    def __init__(self, library: Path, backend: str, log: Path) -> None:
        self.backend = backend
        self.log = log
        self.environment = {
            "PYROCSHMEM_HIP_LIBRARY": str(library),
            "PYROCSHMEM_CUDA_LIBRARY": str(library),
            "STANDIN_LOG": str(log),
        }

    def run(self, code: str, *arguments: str, **extra: str) -> list[dict[str, Any]]:
        self.log.unlink(missing_ok=True)
        environment = self.environment | extra
        return support.run_child(PREAMBLE + code, self.backend, *arguments, **environment)

    def calls(self) -> list[str]:
        lines = self.log.read_text().splitlines()
        return [line for line in lines if not line.startswith(QUERIES)]

    def pick(self, hip: Any, cuda: Any) -> Any:
        return hip if self.backend == "hip" else cuda
