"""The disk cache: whole files or none, keyed by everything that matters, and never trusted."""

from __future__ import annotations

import threading
import warnings

import dsi.runtime.cache as cache
import pytest
import sympy
from dsi.codegen.kernel import Argument, Kernel, Launch, Workspace, digest_of
from dsi.runtime.cache import DiskCache
from dsi.runtime.kernels import load
from dsi.runtime.serialise import expression_from_json, expression_to_json, kernel_from_json, kernel_to_json
from torch.utils._sympy.functions import CeilDiv, FloorDiv, Max


@pytest.fixture
def disk(tmp_path, monkeypatch):
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", set())
    return DiskCache("H200 sm_90")


def test_what_was_written_is_read(disk):
    assert disk.read("choices", "k") is None
    disk.write("choices", "k", {"block": [16, 64]})
    assert disk.read("choices", "k") == {"block": [16, 64]}
    assert disk.read("choices", "other") is None
    assert DiskCache("A100 sm_80").read("choices", "k") is None


def test_the_folder_is_that_of_this_version(disk, monkeypatch):
    disk.write("choices", "k", 1)
    cache.stamp.cache_clear()
    monkeypatch.setattr(cache, "source_digest", lambda: "another version of dsi")
    assert disk.read("choices", "k") is None
    monkeypatch.undo()
    cache.stamp.cache_clear()


def test_without_caching_nothing_is_written(disk, tmp_path):
    off = DiskCache("H200 sm_90", enabled=False)
    off.write("choices", "k", 1)
    assert off.read("choices", "k") is None
    path = off.write_source("x = 1\n", digest_of("x = 1\n"))
    assert path.read_text() == "x = 1\n"
    assert not (tmp_path / "cache").exists()


DAMAGED = {
    "empty": "",
    "cut": '{"format": 1, "key": "k", "val',
    "foreign": '{"hello": 1}',
    "list": "[1]",
    "binary": "\x00\x01",
    "deep": "[" * 200000,
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_ignored_with_one_warning_and_written_anew(disk, text):
    disk.write("choices", "k", 1)
    (path,) = disk.folder.rglob("*.json")
    path.write_text(text)
    with pytest.warns(UserWarning, match="ignoring the cache at") as caught:
        assert disk.read("choices", "k") is None
        assert disk.read("choices", "k") is None
    assert len(caught) == 1
    disk.write("choices", "k", 2)
    assert disk.read("choices", "k") == 2


def test_a_changed_value_is_not_believed(disk):
    disk.write("choices", "k", {"block": 64})
    (path,) = disk.folder.rglob("*.json")
    path.write_text(path.read_text().replace("64", "32"))
    with pytest.warns(UserWarning, match="do not belong to its key"):
        assert disk.read("choices", "k") is None


def test_bytes_that_are_no_text_are_ignored(disk):
    disk.write("choices", "k", 1)
    (path,) = disk.folder.rglob("*.json")
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.warns(UserWarning):
        assert disk.read("choices", "k") is None


def test_an_unwritable_cache_warns_and_goes_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path / "file" / "below"))
    monkeypatch.setattr(cache, "_warned", set())
    disk = DiskCache("d")
    with pytest.warns(UserWarning, match="ignoring the cache"):
        disk.write("choices", "k", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert disk.read("choices", "k") is None
        assert disk.write_source("y = 2\n", digest_of("y = 2\n")).read_text() == "y = 2\n"


def test_a_folder_that_cannot_be_used_is_said_once(tmp_path, monkeypatch):
    """Not once for each region: where it is a file, and where its files cannot be read."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(cache, "_warned", set())
    with pytest.warns(UserWarning, match="ignoring the cache") as caught:
        for key in "abc":
            assert DiskCache("d").read("choices", key) is None
            DiskCache("d").write("choices", key, 1)
    assert len(caught) == 1

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr("pathlib.Path.read_text", refused)
    with pytest.warns(UserWarning, match="Permission denied") as caught:
        assert [DiskCache("d").read("choices", key) for key in "abc"] == [None] * 3
    assert len(caught) == 1


def test_a_home_is_found_for_a_tilde_and_not_needed(disk, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DSI_CACHE_DIR", "~/kernels")
    assert cache.root() == tmp_path / "home" / "kernels"
    monkeypatch.delenv("DSI_CACHE_DIR")
    assert cache.root() == tmp_path / "home" / ".cache" / "dsi"

    def homeless(path):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr("pathlib.Path.expanduser", homeless)  # what a user without an entry in /etc/passwd gets
    with pytest.warns(UserWarning, match="DSI_CACHE_DIR"):
        disk.write("choices", "k", 1)
    assert disk.read("choices", "k") == 1


def test_writers_at_once_leave_one_whole_file(disk):
    threads = [threading.Thread(target=disk.write, args=("choices", "k", [number] * 5000)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    value = disk.read("choices", "k")
    assert len(value) == 5000 and len(set(value)) == 1
    assert not list(disk.folder.rglob("*.tmp"))


# --------------------------------------------------------------------------------------------------------------------- kernels


def kernel(source: str = "ANSWER = 41 + 1\n") -> Kernel:
    rows = sympy.Symbol("s0", integer=True, positive=True)
    launch = Launch(
        "entry",
        (Argument("input", 2), Argument("output", 0), Argument("size", expr=rows * 4), Argument("workspace", 0)),
        {"BLOCK": 16, "flag": True, "scale": 0.5},
        (CeilDiv(rows, 16), sympy.ceiling(rows / 3), FloorDiv(rows, 5) + Max(rows, 2)),
        4,
        2,
        words=(0, 2),
    )
    return Kernel("k", source, digest_of(source), (launch,), 64, "skinny", (Workspace(rows * 2, "int32", True),))


def test_a_kernel_survives_the_disk():
    made = kernel()
    assert kernel_from_json(kernel_to_json(made), made.source) == made


def test_expressions_survive_and_nothing_is_evaluated():
    x, y = sympy.Symbol("x", integer=True, nonnegative=True), sympy.Symbol("y")
    for expr in (x * 3 + y / 2, sympy.Piecewise((x, x < 4), (y, True)), sympy.floor(x / 7), sympy.And(x < 3, y > x)):
        assert expression_from_json(expression_to_json(expr)) == expr
    with pytest.raises(ValueError, match="cannot be stored"):
        expression_to_json(sympy.sin(x))
    for text in ("__import__('os').system('true')", ["__import__", "os"], ["eval", "1"], [], None, True):
        with pytest.raises((ValueError, TypeError)):
            expression_from_json(text)


def test_a_source_is_loaded_from_its_file(disk):
    source = "ANSWER = 40 + 2\n"
    assert load(kernel(source), disk).ANSWER == 42
    assert disk.source_path(digest_of(source)).read_text() == source


def test_a_source_file_that_was_changed_is_never_run(disk):
    source = "ANSWER = 1\n"
    path = disk.write_source(source, digest_of(source))
    path.write_text("raise SystemExit('foreign code ran')\n")
    with pytest.warns(UserWarning, match="digest"):
        assert disk.read_source(digest_of(source)) is None
    assert load(kernel(source), disk).ANSWER == 1
    assert path.read_text() == source
