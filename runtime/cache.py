"""The disk cache: kernel sources as .py text, everything else as JSON. Never pickle.

Files lie under `DSI_CACHE_DIR` (default ~/.cache/dsi), in a folder named by everything that a kernel depends on besides its region: dsi's
own source files, the versions of torch and triton, and the device. A file that is not what it should be is ignored with one warning and
written anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

import torch

FORMAT = 1
_warned: set[str] = set()
_lock = threading.Lock()


def root() -> Path:
    """The folder of the cache, which may not exist yet. A user without a home (a container's, say) has one for the process."""
    try:
        return Path(os.environ.get("DSI_CACHE_DIR") or "~/.cache/dsi").expanduser()
    except RuntimeError as error:
        _warn(Path("~/.cache/dsi"), f"{error} DSI_CACHE_DIR names another folder")
        return Path(_process_folder()) / "cache"


@functools.cache
def source_digest() -> str:
    """A hash of every source file of dsi that a kernel can depend on, given its region: the passes decide what the region is, not its
    kernel.
    """
    import dsi.codegen
    import dsi.ir
    import dsi.runtime

    digest = hashlib.sha256()
    for package in (dsi.ir, dsi.codegen, dsi.runtime):
        for folder in sorted(package.__path__):
            for path in sorted(Path(folder).rglob("*")):
                if path.suffix in (".py", ".jinja", ".j2", ".json"):
                    digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def triton_version() -> str:
    """The version of triton that is installed, "none" without one."""
    from importlib.metadata import PackageNotFoundError, version

    for name in ("triton", "pytorch-triton"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "none"


@functools.cache
def stamp(device: str) -> str:
    """The name of the folder for this version of everything and `device` (a name with its capability)."""
    parts = (str(FORMAT), source_digest(), torch.__version__, triton_version(), device)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class DiskCache:
    """JSON values and source texts by key, for one device. With `enabled=False` it holds nothing."""

    def __init__(self, device: str, enabled: bool = True):
        self.enabled = enabled
        self.device = device

    @property
    def folder(self) -> Path:
        return root() / stamp(self.device)

    def read(self, kind: str, key: str) -> Any:
        """The JSON value stored under `key`, None where there is none or it is damaged."""
        if not self.enabled:
            return None
        path = self._path(kind, key)
        text = read_text(path)
        if text is None:
            return None
        try:
            stored = json.loads(text)
            if stored["format"] != FORMAT or stored["key"] != key or stored["digest"] != _digest(stored["value"]):
                raise ValueError("its contents do not belong to its key")
            return stored["value"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            _warn(path, str(error))
            return None

    def write(self, kind: str, key: str, value: Any) -> None:
        """Stores a JSON value under `key`, whole or not at all."""
        if self.enabled:
            content = {"format": FORMAT, "key": key, "digest": _digest(value), "value": value}
            write_text(self._path(kind, key), json.dumps(content, indent=1))

    def read_source(self, digest: str) -> str | None:
        """The source text with this digest, None where there is none or it is damaged."""
        path = self.source_path(digest)
        text = read_text(path) if self.enabled else None
        if text is not None and _source_digest(text) != digest:
            _warn(path, "its text does not have the digest that names it")
            return None
        return text

    def write_source(self, source: str, digest: str) -> Path:
        """The path of a file that holds `source`: in the cache, or in a folder of this process where the cache cannot be used."""
        path = self.source_path(digest)
        if self.enabled and (self.read_source(digest) == source or write_text(path, source)):
            return path
        path = Path(_process_folder()) / path.name
        if not path.exists():
            write_text(path, source)
        return path

    def source_path(self, digest: str) -> Path:
        return self.folder / "kernels" / f"{digest}.py"

    def _path(self, kind: str, key: str) -> Path:
        return self.folder / kind / (hashlib.sha256(key.encode()).hexdigest()[:32] + ".json")


def read_text(path: Path) -> str | None:
    """The text of a file; None where there is none, and, with a warning, where it cannot be read (one for all files of a folder)."""
    try:
        return path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError as error:
        _warn(path, str(error))
    except OSError as error:
        _warn(path.parent, str(error))
    return None


def write_text(path: Path, text: str) -> bool:
    """Writes a file whole or not at all: a temporary file in the same folder, renamed. False, with one warning, where that is not
    possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        return True
    except OSError as error:
        _warn(path.parent, f"it cannot be written ({error})")
        return False


@functools.cache
def _process_folder() -> str:
    folder = tempfile.TemporaryDirectory(prefix="dsi-kernels-")
    _kept.append(folder)
    return folder.name


_kept: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _source_digest(text: str) -> str:
    from dsi.codegen.kernel import digest_of

    return digest_of(text)


def _warn(path: Path, reason: str) -> None:
    with _lock:
        if str(path) in _warned:
            return
        _warned.add(str(path))
    warnings.warn(f"dsi: ignoring the cache at {path}: {reason}", stacklevel=3)
