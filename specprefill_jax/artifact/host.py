"""This machine's CPU, as Linux describes it: artifacts name the instruction sets they were compiled for."""

from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """The feature flags of the first CPU; empty where the system does not tell."""
    return frozenset(_field(cpuinfo, ("flags", "Features")).split())


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """What the CPU calls itself."""
    return _field(cpuinfo, ("model name",)) or "CPU"


def _field(cpuinfo: Path, keys: tuple[str, ...]) -> str:
    try:
        lines = cpuinfo.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in keys:
            return value.strip()
    return ""
