"""The wheel and the editable install both give `dsi.*`, and torch finds the backend by its entry point, with nothing of dsi imported."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]

# Run in a process of its own under the environment to be checked; prints what it found.
PROBE = """
import json, pkgutil, importlib, sys
import torch._dynamo
backends = torch._dynamo.list_backends(exclude_tags=())
before = sorted(name for name in sys.modules if name.split(".")[0] == "dsi")
backend = torch._dynamo.backends.registry.lookup_backend("dsi")
import dsi
names = [m.name for m in pkgutil.walk_packages(dsi.__path__, "dsi.") if not m.name.endswith("__main__")] + sys.argv[1:]
files = {name: importlib.import_module(name).__file__ for name in names}
print(json.dumps(dict(listed="dsi" in backends, before=before, files=files, module=backend.__module__, name=backend.__name__)))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> Path:
    """A copy of what a build reads: a build in the checkout would leave files there and could pick up old ones."""
    copy = tmp_path_factory.mktemp("sources")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    for folder in {mapped.split("/")[0] for mapped in SETTINGS["package-dir"].values()}:
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def pip(*arguments: str) -> None:
    """pip without an index: what is built here comes from here alone."""
    command = [sys.executable, "-m", "pip", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PIP_NO_INDEX": "1"})
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(sources, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    (made,) = folder.glob("*.whl")
    return made


def probe(python: str, folder: Path, **environment: str) -> dict:
    """What `PROBE` finds when run by `python` in an empty folder."""
    folder.mkdir(parents=True, exist_ok=True)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, "-c", PROBE, *SETTINGS["packages"]]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env={**clean, **environment})
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def check(found: dict, home: Path) -> None:
    """The backend is listed without an import, is the plain function, and every module lies under `home`."""
    assert found["listed"]
    assert found["before"] == []
    assert (found["module"], found["name"]) == ("dsi.compiler.backend", "dsi")
    strays = {name: file for name, file in found["files"].items() if not Path(file).is_relative_to(home)}
    assert not strays


def test_wheel_installs_and_torch_finds_the_backend(wheel, tmp_path):
    site = tmp_path / "site"
    pip("install", "--quiet", "--no-deps", "--target", str(site), str(wheel))
    check(probe(sys.executable, tmp_path / "empty", PYTHONPATH=str(site)), site)


def test_wheel_holds_every_package_and_nothing_at_top_level_but_dsi(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {f"dsi/compiler/page/page.{end}" for end in ("html.j2", "css", "js")} <= set(names)
    assert {name.split("/")[0] for name in names if ".dist-info" not in name.split("/")[0]} == {"dsi"}
    assert "dsi/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    modules = {
        f"{package.replace('.', '/')}/{source.name}"
        for package, folder in SETTINGS["package-dir"].items()
        for source in (ROOT / folder).glob("*.py")
    }
    assert modules <= set(names)


def test_every_folder_with_sources_is_a_mapped_package():
    """A sub-package that is not listed works in the checkout and is missing from the wheel."""
    mapped = {ROOT / folder for folder in SETTINGS["package-dir"].values()}
    tops = {ROOT / folder.split("/")[0] for folder in SETTINGS["package-dir"].values()}
    found = {source.parent for top in tops for source in top.rglob("*.py")}
    assert found <= mapped
    assert set(SETTINGS["packages"]) == set(SETTINGS["package-dir"])


def test_editable_install_imports_from_the_sources_and_sees_edits(sources, tmp_path):
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    scheme = {"base": str(environment), "platbase": str(environment)}
    site = Path(sysconfig.get_path("purelib", vars=scheme))
    (site / "zz_borrowed.pth").write_text("".join(f"{p}\n" for p in sys.path if p.endswith(("site-packages", "dist-packages"))))
    pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(sources))
    check(probe(str(python), tmp_path / "empty"), sources)
    with open(sources / "ir" / "errors.py", "a") as source:
        source.write("\nEDITED = True\n")
    command = [str(python), "-c", "import dsi.ir.errors as e; assert e.EDITED"]
    assert subprocess.run(command, check=False, cwd=tmp_path).returncode == 0
