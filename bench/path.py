"""Import `dsi` from this checkout where it is not installed: a machine with torch and triton but no network needs only the checkout.

The folders of the checkout are the sub-packages of `dsi` (pyproject.toml maps them); without an installation nothing else says so.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def backend() -> Any:
    """The backend function, to be given to torch.compile: the installed one, or else the checkout's."""
    if importlib.util.find_spec("dsi.compiler") is None:
        use_checkout()
    from dsi.compiler.backend import dsi

    return dsi


def use_checkout() -> None:
    """Make `import dsi` mean the checkout's. Must come before anything else of dsi is imported."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dsi"]:
        del sys.modules[name]
    folders = [str(ROOT / "dsi"), str(ROOT)]
    spec = importlib.util.spec_from_file_location("dsi", ROOT / "dsi" / "__init__.py", submodule_search_locations=folders)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["dsi"] = module
    spec.loader.exec_module(module)
