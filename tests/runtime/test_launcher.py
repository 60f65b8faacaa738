"""Direct launches: what reaches the driver is what Triton's own launch would have sent, for everything that Triton specialises on."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
from types import SimpleNamespace

import pytest
import torch
from dsi.codegen.kernel import Launch
from dsi.ir.errors import DsiError
from dsi.runtime.launch import programmatic, settle
from dsi.runtime.launcher import Launcher, hooked, kinds
from dsi.runtime.straight import straight
from hypothesis import given
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

SOURCE = """
import triton
import triton.language as tl


@triton.jit
def add(x_ptr, y_ptr, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)
"""
CONSTANTS = {"PDL": False, "BLOCK": 16, "num_warps": 1, "num_stages": 1, "enable_fp_fusion": True}
ORDER = [(0, 0), (1, 0), (3, 0)]  # an input, an output, an integer
STREAM = 7


@pytest.fixture
def driver(monkeypatch):
    """A driver for a GPU that is not there: kernels are compiled for it, and their launches are noted."""
    from triton.backends.compiler import GPUTarget

    launches = []

    class Loaded:
        def __init__(self, source, metadata):
            pass

        def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
            sent = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in arguments]
            launches.append((x, y, z, stream, function, packed, sent))

    def load_binary(name, kernel, shared, device):
        load_binary.count += 1
        return object(), load_binary.count, 32, 0, 1024

    load_binary.count = 0
    utils = SimpleNamespace(
        load_binary=load_binary,
        unload_module=lambda module: None,
        get_device_properties=lambda device: {"max_shared_mem": 232448, "multiprocessor_count": 132},
    )
    active = SimpleNamespace(
        utils=utils,
        launcher_cls=Loaded,
        get_current_device=lambda: 0,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", active)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    yield launches
    gc.collect()  # kernels unload themselves, by the driver that loaded them


@pytest.fixture
def function(tmp_path, driver):
    path = tmp_path / "add.py"
    path.write_text(SOURCE)
    found = importlib.util.spec_from_file_location("dsi_test_add", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module.add
    module.add.device_caches.clear()


def written_out(bound):
    """A function of inputs and outputs with the code of a launch in it."""
    scope = {}

    def name(value):
        scope[f"name{len(scope)}"] = value
        return f"name{len(scope) - 1}"

    lines = bound.written_out(["one"], ["other"], name)
    exec("def run(inputs, outputs):\n    (one,), (other,) = inputs, outputs\n" + "".join(f"    {line}\n" for line in lines), scope)
    return scope["run"]


def test_a_direct_launch_sends_what_triton_sends(function, driver):
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM)
    memory = torch.zeros(1024)
    for x, n in [(memory, 100), (memory[1:], 100), (memory[4:], 100), (memory, 1), (memory, 32), (memory, 2**31), (memory, 7)]:
        y, made = torch.zeros(100), []
        for _ in range(2):  # by Triton at first where the kind is new, and then directly
            launcher.launch((3, 2), [x], [y], [], (n,))
            made.append(driver.pop())
        bound = launcher.bound((3, 2), (n,))
        for launch in (bound, written_out(bound)):  # without a key of its own, and as a part of another function
            launch([x], [y])
            made.append(driver.pop())
        function[(3, 2)](x, y, n, **CONSTANTS)
        assert made == [driver.pop()] * 4 and not driver
        assert made[0][:4] == (3, 2, 1, STREAM) and x.data_ptr() in made[0][-1]
    assert len({found[1] for found in launcher.compiled.values()}) == len(launcher.compiled) == 5


def test_a_tensor_read_in_words_must_be_aligned_in_every_launch(function, driver):
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM, words=(0,))
    memory, y = torch.zeros(1024), torch.zeros(100)
    for x in (memory, memory[4:]):
        launcher.launch((1,), [x], [y], [], (100,))
    launches = len(driver)
    bound = launcher.bound((1,), (100,))
    apart = written_out(bound)
    for launch in (lambda x: launcher.launch((1,), [x], [y], [], (100,)), lambda x: bound([x], [y]), lambda x: apart([x], [y])) * 2:
        with pytest.raises(DsiError, match=r"the int8 weight x lies at .* no multiple of 16 bytes"):
            launch(memory[1:])
    launcher.launch((1,), [memory], [y[1:]], [], (100,))  # what is not read in words may lie anywhere
    assert len(driver) == launches + 1


def test_the_second_launch_does_not_go_through_triton(function, driver, monkeypatch):
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM)
    x, y = torch.zeros(64), torch.zeros(64)
    launcher.launch((1,), [x], [y], [], (64,))
    monkeypatch.setattr(type(function), "run", None)
    launcher.launch((1,), [x], [y], [], (48,))
    launcher.bound((1,), (48,))([x], [y])
    assert len(driver) == 3


def test_a_bound_launch_may_be_the_first(function, driver, monkeypatch):
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM)
    bound, x, y = launcher.bound((1,), (64,)), torch.zeros(64), torch.zeros(64)
    bound([x], [y])
    monkeypatch.setattr(type(function), "run", None)
    bound([x], [y])
    launcher.launch((1,), [x], [y], [], (64,))
    assert driver[0] == driver[1] == driver[2] and len(driver) == 3


def test_scratch_memory_of_a_launch_that_is_written_out_is_a_sequence(function, driver):
    launcher, (x, y) = Launcher(function, CONSTANTS, [(0, 0), (2, 1), (3, 0)], lambda: STREAM), torch.zeros(2, 64)
    bound, scope = launcher.bound((1,), (64,)), {}

    def name(value):
        return scope.setdefault(f"name{len(scope)}", value) is value and f"name{len(scope) - 1}"

    lines = bound.written_out(["x"], [], name, "scratch")
    exec("def run(x, scratch):\n" + "".join(f"    {line}\n" for line in lines), scope)
    for _ in range(2):
        scope["run"](x, [None, y])
        bound([x], [], (), [None, y])
    assert len(driver) == 4 and driver[0][-1][:2] == [x.data_ptr(), y.data_ptr()] and driver == [driver[0]] * 4


def test_a_launch_that_is_written_out_may_be_the_first(function, driver, monkeypatch):
    launch, x, y = written_out(Launcher(function, CONSTANTS, ORDER, lambda: STREAM).bound((1,), (64,))), torch.zeros(64), torch.zeros(64)
    launch([x], [y])
    monkeypatch.setattr(type(function), "run", None)
    launch([x], [y])
    assert driver[0] == driver[1] and len(driver) == 2


def test_what_is_compiled_ahead_is_what_is_launched(function, driver, monkeypatch):
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM)
    kernel = launcher.compile((1,), [torch.float32], [torch.float32], [], (64,))
    assert kernel.n_spills == 0 and not driver
    monkeypatch.setattr(type(function), "run", None)
    launcher.launch((1,), [torch.zeros(64)], [torch.zeros(64)], [], (48,))
    assert len(driver) == 1


def test_a_profiler_is_told_of_every_launch(function, driver):
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM)
    x, y, asked = torch.zeros(64), torch.zeros(64), []
    launcher.launch((1,), [x], [y], [], (64,))
    assert not hooked()
    original = type(function).run

    def hook(metadata):
        pass

    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        type(function).run = lambda *args, **kwargs: asked.append(1) or original(*args, **kwargs)
        launcher.launch((1,), [x], [y], [], (64,))
        launcher.bound((1,), (64,))([x], [y])
    finally:
        type(function).run = original
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    assert asked == [1, 1] and len(driver) == 3
    assert not hooked()


def test_a_parameter_with_a_default_is_left_to_triton(function, driver):
    launcher = Launcher(function, {"BLOCK": 16}, ORDER, lambda: STREAM)
    assert launcher.launch == launcher._by_triton
    asked = []
    launcher._by_triton = lambda *given: asked.append(given)
    launcher.launch = launcher._by_triton
    launcher.bound((3,), (5,))("inputs", "outputs", (), "workspaces")
    assert asked == [((3,), "inputs", "outputs", "workspaces", (5,))]


NUMBERS = st.one_of(st.integers(-64, 64), st.sampled_from([s * 2**e + d for e in (31, 32, 62) for d in (-1, 0, 1) for s in (1, -1)]))


@given(NUMBERS, NUMBERS)
def test_integers_of_one_kind_are_specialised_alike(a, b):
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    first, second = (native_specialize_impl(BaseBackend, value, False, True, True) for value in (a, b))
    assert (kinds((a,)) == kinds((b,))) == (first == second)


# ------------------------------------------------------------------------------------------------ programmatic dependent launch

WAITS = Launch("entry", (), {"PDL": True, "BLOCK_M": 1}, (), 4, 2, {"launch_pdl": True, "enable_fp_fusion": True})


@pytest.mark.parametrize(
    "able, overlaps, waits, early",
    [(True, True, True, True), (True, False, True, None), (False, True, False, None), (False, False, False, None)],
)
def test_when_a_kernel_waits_and_when_it_may_start_early(able, overlaps, waits, early):
    settled = settle(WAITS, able, overlaps)
    assert (settled["PDL"], settled.get("launch_pdl")) == (waits, early)
    assert settled["enable_fp_fusion"] and (settled["num_warps"], settled["num_stages"], settled["BLOCK_M"]) == (4, 2, 1)


def test_the_interpreter_is_given_no_assembly(monkeypatch):
    words = dataclasses.replace(WAITS, constants={"DP4A": True})
    assert settle(words, True, True)["DP4A"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not settle(words, False, True)["DP4A"]


def test_a_kernel_that_does_not_wait_never_starts_early():
    assert "launch_pdl" not in settle(dataclasses.replace(WAITS, constants={}), True, True)


def test_kernels_on_a_cpu_do_not_wait():
    assert not programmatic(torch.device("cpu"))


# -------------------------------------------------------------------------------------------------------- without Triton's Python


class Spread:
    """As Triton's launcher of a kernel was up to 3.6, and hands over its arguments one by one."""

    scratch, pdl = 0, True

    def __init__(self, launch):
        self.launch = launch

    def __call__(self, x, y, z, stream, function, *arguments):
        scratch = "memory" * (x * self.scratch) if self.scratch else None
        self.launch(x, y, z, stream, function, False, self.pdl, scratch, *arguments)


class Together(Spread):
    """As it is in newer versions."""

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments):
        self.launch(x, y, z, stream, function, self.pdl, packed, metadata, enter, leave, b"signature", arguments)


class Scratch(Spread):
    scratch = 16


class Counting(Spread):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(x, y, z, stream, function, *arguments, len(arguments))


class Exchanging(Spread):
    def __call__(self, x, y, z, stream, function, *arguments):
        self.launch(y, x, z, stream, function, *arguments)


@pytest.mark.parametrize("kind, past", [(Spread, True), (Together, True), (Scratch, False), (Counting, False), (Exchanging, False)])
def test_what_a_launcher_adds_is_found_out_and_where_it_does_more_it_is_asked(kind, past):
    sent = []
    run, arguments = kind(lambda *given: sent.append(given)), (11, 12, True)
    way = straight(run, "packed", len(arguments))
    assert (way.call is run.launch) == past and not sent
    way.call(3, 2, 1, STREAM, "function", *way.between, *([arguments] if way.together else arguments))
    run(3, 2, 1, STREAM, "function", "packed", None, None, None, *arguments)
    assert sent[0] == sent[1]


def test_a_function_is_called_as_it_is():
    way = straight(print, "packed", 2)
    assert way.call is print and way.between == ("packed", None, None, None) and not way.together


@pytest.mark.parametrize("kind", [Spread, Together, Scratch])
def test_launches_past_tritons_launcher_send_what_it_sends(function, driver, kind, monkeypatch):
    sent = []
    monkeypatch.setattr(triton.runtime.driver.active, "launcher_cls", lambda source, metadata: kind(lambda *given: sent.append(given)))
    launcher = Launcher(function, CONSTANTS, ORDER, lambda: STREAM)
    x, y = torch.zeros(64), torch.zeros(64)
    for _ in range(2):  # by Triton, and directly
        launcher.launch((3, 2), [x], [y], [], (64,))
    launcher.bound((3, 2), (64,))([x], [y])
    assert _sent(sent[0]) == _sent(sent[1]) == _sent(sent[2]) and len(sent) == 3


def _sent(given):
    """Numbers for tensors; what is there for profilers alone left out."""
    given = (*given[:-1], *given[-1]) if isinstance(given[-1], tuple) else given
    told = (None if type(value).__name__ in ("LazyDict", "HookChain") else value for value in given)
    return [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in told]


def test_tritons_own_launcher_is_one_that_hands_its_arguments_over(driver):
    nvidia = pytest.importorskip("triton.backends.nvidia.driver")
    run, sent = object.__new__(nvidia.CudaLauncher), []
    sizes = dict.fromkeys(("global_scratch_size", "global_scratch_align", "profile_scratch_size", "profile_scratch_align"), 0)
    given = {"launch_pdl": True, "launch_cooperative_grid": False, "num_ctas": 1, "gsan_enabled": False}
    run.__dict__.update(sizes | given | {"arg_annotations": [], "kernel_signature": b"", "launch": lambda *given: sent.append(given)})
    way = straight(run, (4, 1, 0), 3)
    assert way.call is run.launch
    way.call(3, 2, 1, STREAM, 5, *way.between, *([(7, 8, True)] if way.together else (7, 8, True)))
    run(3, 2, 1, STREAM, 5, (4, 1, 0), None, None, None, 7, 8, True)
    assert sent[0] == sent[1]
