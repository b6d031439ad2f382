"""Benchmarks: one file each, peers beside us in the same run. ``run(**options)`` returns one JSON-ready object."""

from __future__ import annotations

import os
import platform
import resource
import sys
from importlib import metadata
from typing import Any

PACKAGES = (
    "cachegen-rag",
    "llama-cpp-python",
    "numpy",
    "numba",
    "torch",
    "triton",
    "transformers",
    "diskcache",
    "httpx",
)


def environment(model: object | None = None) -> dict[str, Any]:
    """Versions, cores and model: what a figure was measured with."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "versions": versions,
        "model": getattr(model, "name", None) if model is not None else None,
    }


def processor() -> str:
    """The processor's own name where the system tells it."""
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def peak_rss_mb() -> float:
    """Peak resident memory of this process so far, MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20) if sys.platform == "darwin" else peak / 1024


def quartiles(values: list[float]) -> dict[str, float]:
    """Median and quartiles of a list of measurements."""
    import numpy as np

    low, mid, high = np.percentile(values, [25, 50, 75])
    return {"median": float(mid), "q1": float(low), "q3": float(high), "n": len(values)}
