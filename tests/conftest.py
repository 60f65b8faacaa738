"""What every test runs under: one thread, fixed seeds, fresh Dynamo state, no silent recompiles, caches of its own, no network."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest

# Before torch is imported. One thread a worker, and no pool of compile workers beside it: the suite runs one worker a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
_OWN_CACHES = "DSI_TEST_CACHES" not in os.environ
if _OWN_CACHES:
    # Made by the first process of a run and inherited by its workers: a run shares compiled code, two runs never do.
    _folder = tempfile.mkdtemp(prefix="dsi-tests-")
    os.environ["DSI_TEST_CACHES"] = _folder
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_folder}/inductor"
    os.environ["TRITON_CACHE_DIR"] = f"{_folder}/triton"
    os.environ["DSI_CACHE_DIR"] = f"{_folder}/dsi"
for _name in [name for name in os.environ if name in ("DSI_DUMP", "DSI_CHECK", "DSI_FUEL", "DSI_CACHE", "DSI_TRACER", "TRITON_INTERPRET")]:
    del os.environ[_name]  # a user's settings must not change what a test sees

import torch
import torch._dynamo

torch.set_num_threads(1)

IN_CI = os.environ.get("CI", "").lower() == "true"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write golden files instead of comparing with them")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="gpu: no CUDA device here"))


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _OWN_CACHES:
        shutil.rmtree(os.environ["DSI_TEST_CACHES"], ignore_errors=True)


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    return str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    # Neither a GPU nor a browser is a package that set-up could have installed everywhere, and DeepSpeed is one that it should not.
    excused = any(item.get_closest_marker(name) for name in ("gpu", "browser", "deepspeed"))
    if IN_CI and report.skipped and not hasattr(report, "wasxfail") and not excused:
        report.outcome = "failed"
        report.longrepr = f"skipped where CI=true, which counts as a failure: {_skip_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped at import where CI=true, which counts as a failure: {_skip_reason(report)}"
    return report


@pytest.fixture(autouse=True)
def fresh_torch(request: pytest.FixtureRequest):
    """Seeds, and Dynamo as in a new process; a recompile limit that is reached fails the test instead of running eager in silence. Tests
    that are marked `one_engine` share an engine, and so what it has compiled: for them nothing but the seeds is set."""
    torch.manual_seed(0)
    if request.node.get_closest_marker("one_engine"):
        yield
        return
    torch._dynamo.reset()
    before = dict(os.environ)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    # A command of the bench may set TRITON_INTERPRET for its process, which here is the next test's too.
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in before.items() if name != "PYTEST_CURRENT_TEST"})


@pytest.fixture(scope="session")
def regenerate_golden(request: pytest.FixtureRequest) -> bool:
    """Whether golden files are to be written anew (`pytest --regenerate-golden`)."""
    return request.config.getoption("--regenerate-golden")


@pytest.fixture
def golden(regenerate_golden: bool):
    """`golden(path, text)`: the file at `path` holds exactly `text`; with --regenerate-golden it is written."""

    def compare(path: Path, text: str) -> None:
        if regenerate_golden:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"{path} is missing: write it with pytest --regenerate-golden, and read it before you commit it"
        assert text == path.read_text(), f"the text differs from {path}; if that is meant, run pytest --regenerate-golden and read the diff"

    return compare
