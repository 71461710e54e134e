"""What the numbers depend on: the machine, its disk, where the directories lie; and the building of the load generator."""

from __future__ import annotations

import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TREE = HERE.parent.parent
FLUSH_SAMPLES = 300
FLUSH_FILE_BYTES = 4 << 20
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


class BenchError(Exception):
    """The measurement cannot be made or cannot be trusted; the text says why."""


def filesystem(path: Path) -> tuple[str, str]:
    """(type, device) of the file system `path` lies on, by the longest mount point above it."""
    real = path.resolve()
    best: tuple[int, str, str] = (-1, "unknown", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, mount, kind = line.split()[:3]
        mount = mount.replace("\\040", " ")
        if real.is_relative_to(mount) and len(mount) >= best[0]:
            best = (len(mount), kind, device)
    return best[1], best[2]


def _first(candidates: list[str], memory: bool) -> Path | None:
    for name in candidates:
        path = Path(name)
        if name and path.is_dir() and os.access(path, os.W_OK) and (filesystem(path)[0] in MEMORY_FILESYSTEMS) is memory:
            return path
    return None


class Places:
    """Throw-away directories: `disk` on a real file system, `memory` on a tmpfs.  `close` removes both."""

    def __init__(self, disk: str | None, memory: str | None) -> None:
        disks = [disk] if disk else ["/var/tmp", tempfile.gettempdir(), str(Path.home()), str(Path.cwd())]
        memories = [memory] if memory else ["/dev/shm", os.environ.get("XDG_RUNTIME_DIR", "")]
        disk_parent, memory_parent = _first(disks, memory=False), _first(memories, memory=True)
        if disk_parent is None:
            raise BenchError("no writable directory on a disk among " + ", ".join(disks))
        if memory_parent is None:
            raise BenchError("no writable tmpfs among " + ", ".join(filter(None, memories)))
        self.disk = Path(tempfile.mkdtemp(prefix="leased-bench-", dir=disk_parent))
        self.memory = Path(tempfile.mkdtemp(prefix="leased-bench-", dir=memory_parent))
        # PostgreSQL runs under another user and must reach its own directory.
        self.disk.chmod(0o711)

    def close(self) -> None:
        shutil.rmtree(self.disk, ignore_errors=True)
        shutil.rmtree(self.memory, ignore_errors=True)


def build_load(directory: Path) -> Path:
    """Compiles the load generator into `directory`; a warning is an error."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError("no C compiler (cc, gcc or clang) found")
    binary = directory / "load"
    sources = [str(path) for path in sorted(HERE.glob("*.c"))]
    flags = ["-O2", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
    built = subprocess.run([compiler, *flags, "-o", str(binary), *sources], capture_output=True, text=True, check=False)
    if built.returncode:
        raise BenchError(f"the load generator does not compile:\n{built.stderr}")
    return binary


def flush_cost(directory: Path) -> dict[str, float]:
    """Microseconds of one 4 KiB overwrite of written space with fdatasync, the cheapest flush this disk has."""
    path = directory / "flush"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(fd, bytes(FLUSH_FILE_BYTES))
        os.fsync(fd)
        block = os.urandom(4096)
        took = []
        for _ in range(FLUSH_SAMPLES):
            offset = random.randrange(FLUSH_FILE_BYTES // 4096) * 4096
            start = time.perf_counter_ns()
            os.pwrite(fd, block, offset)
            os.fdatasync(fd)
            took.append((time.perf_counter_ns() - start) / 1000)
    finally:
        os.close(fd)
        path.unlink()
    cuts = statistics.quantiles(took, n=100)
    return {"p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "Processor"):
            return value.strip()
    return platform.machine()


def facts(places: Places) -> dict[str, Any]:
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_mib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20,
        "kernel": platform.release(),
        "load_average_at_start": os.getloadavg()[0],
        "disk": {"path": str(places.disk.parent), "filesystem": filesystem(places.disk)[0], "device": filesystem(places.disk)[1]},
        "runtime": {"path": str(places.memory.parent), "filesystem": filesystem(places.memory)[0]},
        "flush": flush_cost(places.disk),
        "python": f"{platform.python_version()} ({sys.executable})",
    }
