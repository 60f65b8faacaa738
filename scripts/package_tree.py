"""Lay the package out as it is imported (dsi/ir, dsi/passes, ...), in links, for tools that read sources and know no package-dir mapping.

python scripts/package_tree.py FOLDER
"""

from __future__ import annotations

import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def package_folders() -> dict[str, Path]:
    """Package name -> its folder, as pyproject.toml maps them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    return {name: ROOT / settings["package-dir"][name] for name in settings["packages"]}


def lay_out(target: Path) -> None:
    """Make `target` hold the packages, one link a file, so that each module is found under the name by which it is imported."""
    shutil.rmtree(target, ignore_errors=True)
    for name, folder in package_folders().items():
        place = target.joinpath(*name.split("."))
        place.mkdir(parents=True)
        for source in folder.iterdir():
            if source.suffix in (".py", ".typed", ".j2", ".css", ".js"):
                (place / source.name).symlink_to(source)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]))
