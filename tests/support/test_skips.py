"""Continuous integration may not skip: a test that skips there for a missing package would prove nothing and say nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parent.parent / "conftest.py"
BODIES = {
    "missing_package": "import pytest\ndef test(): pytest.importorskip('no_such_package')\n",
    "missing_at_import": "import pytest\npytest.importorskip('no_such_package')\ndef test(): pass\n",
    "device": "import pytest\n@pytest.mark.gpu\ndef test(): pytest.skip('no device of that kind')\n",
    "browser": "import pytest\n@pytest.mark.browser\ndef test(): pytest.skip('no browser here')\n",
    "expected_failure": "import pytest\n@pytest.mark.xfail\ndef test(): assert False\n",
}


def run_pytest(folder: Path, body: str, ci: str) -> int:
    """The exit status of pytest over one test file under this project's conftest."""
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n    browser\n")
    (folder / "test_one.py").write_text(body)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "DSI_TEST"))}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(folder)]
    return subprocess.run(command, env={**environment, "CI": ci}, capture_output=True, check=False).returncode


@pytest.mark.parametrize(
    ("body", "ci", "status"),
    [
        ("missing_package", "true", pytest.ExitCode.TESTS_FAILED),
        ("missing_package", "", pytest.ExitCode.OK),
        ("missing_at_import", "true", pytest.ExitCode.INTERRUPTED),
        ("device", "true", pytest.ExitCode.OK),
        ("browser", "true", pytest.ExitCode.OK),
        ("expected_failure", "true", pytest.ExitCode.OK),
    ],
)
def test_skip_in_continuous_integration(tmp_path, body, ci, status):
    assert run_pytest(tmp_path, BODIES[body], ci) == status
