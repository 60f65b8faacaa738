"""Programs of the CUDA toolkit that benchmarks run others under."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

FOLDERS = ("bin", "compute-sanitizer", "extras/compute-sanitizer")


def program(name: str) -> str | None:
    """The path of a program on the PATH, or of a CUDA toolkit (CUDA_HOME, /usr/local/cuda); None where there is none."""
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    places = [Path(home) / folder for home in homes if home for folder in FOLDERS]
    found = [shutil.which(name), *(shutil.which(place / name) for place in places)]
    return next((path for path in found if path), None)
