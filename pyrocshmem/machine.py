"""What this machine says of itself: links between GPUs, limits of the container."""

import re
import shutil
import subprocess
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
# Of memory and of tasks, where cgroup v2 has it and where v1 does.
_LIMITS = (("memory.max", "memory/memory.limit_in_bytes"), ("pids.max", "pids/pids.max"))
# No limit is "max" in v2, and the largest multiple of a page in v1.
_ENDLESS = 1 << 62
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def parse_links(topology: str) -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link, out of what `nvidia-smi topo -m` prints."""
    found = {}
    for line in _ESCAPES.sub("", topology).splitlines():
        words = line.split()
        if words and (match := re.fullmatch(r"GPU(\d+)", words[0])):
            for column, word in enumerate(words[1:]):
                if not re.fullmatch(r"X|NV\d+|SYS|NODE|PHB|PXB|PIX", word):
                    break
                found[int(match[1]), column] = word
    return found


def links() -> dict[tuple[int, int], str]:
    """(GPU, GPU) -> kind of link; empty where nvidia-smi isn't there or doesn't say."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    command = [program, "topo", "-m"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse_links(done.stdout)


def first_line(path: str | Path) -> str:
    """Of a file, without blanks around it; "" where there is none."""
    try:
        return Path(path).read_text().partition("\n")[0].strip()
    except OSError:
        return ""


def container_limits() -> tuple[int | None, int | None]:
    """(bytes of memory, tasks) that the container, or the control group at hand, may have; None: no limit."""
    memory, tasks = (_limit(*places) for places in _LIMITS)
    return memory, tasks


def _limit(*places: str) -> int | None:
    text = next((line for place in places if (line := first_line(_CGROUP / place))), "")
    return int(text) if text.isdecimal() and int(text) < _ENDLESS else None
