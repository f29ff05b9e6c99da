"""The name of the machine's processor: what a time is worth without it is little."""

import platform
from pathlib import Path


def describe_processor() -> str:
    """The processor's name where Linux tells it, or what the platform does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
