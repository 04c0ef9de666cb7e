"""Where /dev/shm holds no nameless files: memory in a memfd, which is refused in time, since nothing else would.

The library is built with other places for /dev/shm, for the machine's memory and for the control groups.
"""

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pyrocshmem import finegrained_alloc as fga
from tests.finegrained_alloc import support

TIER = 1
pytestmark = pytest.mark.cpu

MIB = 1 << 20
MEMINFO = "MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {} kB\n"
RunChild = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with such a library, and with the files that it reads."""
    folder = tmp_path_factory.mktemp("memfd")
    copy = folder / "package/finegrained_alloc"
    shutil.copytree(support.PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    places = {"SHM": "none", "MEMINFO": "meminfo", "CGROUP": "cgroup"}
    flags = " ".join(f'-DFGA_{name}="{folder / place}"' for name, place in places.items())
    environment = support.environment({"CFLAGS": f"-Werror {flags}"})
    subprocess.run(["sh", str(copy / "build.sh")], check=True, env=environment, timeout=support.TIMEOUT_S)
    return folder


@pytest.fixture
def run_child(library: Path) -> RunChild:
    """`support.run_child` with that library, on a machine with room and without control groups."""
    (library / "meminfo").write_text(MEMINFO.format(1 << 20))
    shutil.rmtree(library / "cgroup", ignore_errors=True)
    ours = '[name for name in sys.modules if name.startswith("finegrained_alloc")]'
    start = f"for name in {ours}: del sys.modules[name]\n"
    start += f"sys.path.insert(0, {str(library / 'package')!r})\nimport finegrained_alloc as fga\n"
    return lambda code: support.run_child(start + code)


def test_memory_is_a_memfd_that_peers_open(run_child: RunChild) -> None:
    code = """
say(found=fga.available("host"))
memory = fga.alloc(20_000_000, "host")
handle = memory.export()
(ctypes.c_char * 5).from_address(memory.ptr).raw = b"hello"
about = os.stat("/proc/self/fd/" + str(int.from_bytes(handle[104:112], "little")))
say(mode=about.st_mode & 0o7777, names=about.st_nlink, held=about.st_blocks * 512 >= 20_000_000)
child = os.fork()
if child == 0:
    with fga.open_handle(handle) as view: say(seen=ctypes.string_at(view.ptr, 5).decode(), other=view.ptr != memory.ptr)
    os._exit(0)
os.waitpid(child, 0)
memory.free()
"""
    found, file, peer = run_child(code)
    assert found["found"][0]
    assert re.fullmatch(r"host: memfd, since .*/none holds no nameless files", found["found"][1])
    assert file == {"mode": 0o600, "names": 0, "held": True}
    assert peer == {"seen": "hello", "other": True}


@pytest.mark.parametrize(
    "limit", ["machine", "cgroup v2", "cgroup v2, above", "cgroup v1", "cgroup v1, above"]
)
def test_what_would_not_fit_is_refused(run_child: RunChild, library: Path, limit: str) -> None:
    """Before anything is taken; 30 MiB of files that were not used lately count as free."""
    group_of = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        group_of["v1" if "memory" in controllers.split(",") else "v2" if not controllers else ""] = group
    if limit == "machine":
        (library / "meminfo").write_text(MEMINFO.format(40 << 10))
        words = f"{40 * MIB} bytes are available on this machine"
    else:
        version = limit[7:9]
        if version not in group_of:
            pytest.skip(f"this process has no control group of {version} that limits memory")
        folder = library / "cgroup" / ("memory" if version == "v1" else "")
        folder /= "" if limit.endswith("above") else group_of[version].strip("/")
        folder.mkdir(parents=True)
        names = ("memory.max", "memory.current", "inactive_file")
        if version == "v1":
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        (folder / names[0]).write_text(f"{100 * MIB}\n")
        (folder / names[1]).write_text(f"{90 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {30 * MIB}\n")
        words = f"the limit of {folder} is {100 * MIB} bytes, {60 * MIB} are in use"
    code = f"""
before = len(os.listdir("/proc/self/fd"))
say(error=error_of(fga.alloc, {41 * MIB}, "host"), left=len(os.listdir("/proc/self/fd")) - before)
fga.alloc({39 * MIB}, "host").free()
"""
    (failed,) = run_child(code)
    kind, text = failed["error"]
    assert kind == "MemoryError"
    assert text == f"host: {41 * MIB} bytes in a memfd: too little memory is left: {words}"
    assert failed["left"] == 0


def test_the_library_as_it_is_built_here_uses_dev_shm() -> None:
    assert "memfd" not in fga.available("host")[1]
