"""How a program is launched on a CUDA device: past Triton after the first call, early where that is safe, tuned where it is asked for."""

from __future__ import annotations

import copy

import dsi.runtime.choices as choices
import dsi.runtime.cuda as cuda
import dsi.runtime.kernels as kernels
import pytest
import torch
import transformers
import zoo
from dsi.compiler.observe import collecting
from dsi.runtime import addresses
from dsi.runtime.addresses import Addresses
from dsi.runtime.launch import programmatic

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16


@pytest.fixture
def made(monkeypatch):
    """The regions and kernels of each program that is compiled, in order."""
    programs = []
    original = cuda.compile_ahead

    def keep(made, sizes, device):
        programs.append(list(made))
        original(made, sizes, device)

    monkeypatch.setattr(cuda, "compile_ahead", keep)
    return programs


class Decoding:
    """Greedy decode steps of a tiny model, eager and compiled, each into a cache of its own."""

    def __init__(self, **options):
        self.model = zoo.decoder("llama", DTYPE).cuda()
        self.compiled = torch.compile(self.model, backend="dsi", **options)
        self.caches = [transformers.StaticCache(config=self.model.config, max_cache_len=64) for _ in range(2)]
        self.ids = torch.randint(3, zoo.VOCAB, (1, 40), generator=torch.Generator().manual_seed(1)).cuda()
        self.done = 0
        self.step(5)

    def step(self, count=1):
        ids = self.ids[:, self.done : self.done + count]
        self.done += count
        with torch.no_grad():
            found = self.compiled(input_ids=ids, past_key_values=self.caches[0]).logits
            expected = self.model(input_ids=ids, past_key_values=self.caches[1]).logits
        assert zoo.relative_error(found, expected) < 0.03
        return found


def launchers(program):
    return [launch.launcher for _, kernel in program for variant in kernel._variants for launch in variant._launches]


def test_after_the_first_call_no_kernel_goes_through_triton(made, monkeypatch):
    import triton

    decoding = Decoding(options={"library": False})
    decoding.step()
    assert len(made) == 2 and all(launcher.compiled for launcher in launchers(made[1]))

    def run(*args, **kwargs):
        raise AssertionError("a kernel was launched through Triton")

    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", run)
    for _ in range(3):
        decoding.step()


def test_steps_along_a_prompt_replay_one_graph():
    """Each step's ids begin elsewhere in their storage."""
    decoding = Decoding(options={"library": False, "mode": "reduce-overhead"})
    for _ in range(3):
        decoding.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoding.step()
    assert [event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch"] == [1]


def test_all_kernels_but_the_first_may_start_early(made):
    decoding = Decoding(options={"library": False})
    decoding.step()
    if not programmatic(torch.device("cuda")):
        assert not any("launch_pdl" in launcher.constants for launcher in launchers(made[1]))
        return
    waiting = [launcher for launcher in launchers(made[1]) if "PDL" in launcher.constants]
    assert waiting and all(launcher.constants["PDL"] for launcher in waiting)
    assert [launcher.constants.get("launch_pdl", False) for launcher in launchers(made[1])][:1] == [False]
    assert [kernel.overlaps for _, kernel in made[1]] == [False] + [True] * (len(made[1]) - 1)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_the_same_step_gives_the_same_bits_with_other_work_on_the_device(mode):
    """Kernels that start early, counters of programs that share a sum, and scratch memory, beside another stream's load."""
    decoding = Decoding(options={"library": False, "mode": mode})
    for _ in range(3):
        decoding.step()
    saved = [copy.deepcopy(layer.__dict__) for layer in decoding.caches[0].layers]
    ids, load, other = decoding.ids[:, 9:10], torch.randn(2048, 2048, device="cuda", dtype=DTYPE), torch.cuda.Stream()

    def again():
        for layer, state in zip(decoding.caches[0].layers, saved, strict=True):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    getattr(layer, name).copy_(value)
        with torch.no_grad():
            return decoding.compiled(input_ids=ids, past_key_values=decoding.caches[0]).logits

    first = again()
    for turn in range(200):
        if turn % 8 == 0:
            with torch.cuda.stream(other):
                load @ load
        assert torch.equal(again(), first)


def test_addresses_are_compared_by_torchs_own_function():
    assert addresses._equal_at is not None, "this build of torch has no _tensors_data_ptrs_at_indices_equal; Python compares"
    inputs = [torch.randn(3, device="cuda"), 7, torch.nn.Parameter(torch.randn(4, device="cuda"))]
    stay = Addresses([0, 2]).stay(inputs)
    assert stay(list(inputs))
    inputs[2].data = torch.randn(4, device="cuda")
    assert not stay(list(inputs))


def test_max_autotune_tries_choices_and_another_compilation_knows_the_winners(tmp_path, monkeypatch):
    monkeypatch.setenv("DSI_CACHE_DIR", str(tmp_path))
    for module, name in [(kernels, "_sets"), (choices, "_winners")]:
        monkeypatch.setattr(module, name, {})
    options = {"library": False, "mode": "max-autotune", "tuning": 20.0}
    with collecting() as contexts:
        decoding = Decoding(options=options)
        for _ in range(3):
            decoding.step()
    notes = [note for context in contexts for note in context.report.notes if note.startswith("tuned ")]
    assert notes and not any(note.startswith("tuned 0") for note in notes), notes
    assert any("*" in context.artifacts.get("tuning.txt", "") for context in contexts)
    assert list(tmp_path.rglob("tuned/*.json"))
    torch._dynamo.reset()
    kernels._sets.clear()
    choices._winners.clear()
    with collecting() as contexts:
        decoding = Decoding(options=options)
        decoding.step()
    assert not [note for context in contexts for note in context.report.notes if note.startswith("tuned ")]
