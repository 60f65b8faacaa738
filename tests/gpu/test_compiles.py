"""What the tests on a device launch, compiled for an H200 without one: no compiler that aborts, no kernel that the device cannot hold.

Outside of the default suite: `pytest -m slow tests/gpu/test_compiles.py`, under the versions of triton in question.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
import zoo
from dsi.codegen import generate
from dsi.codegen.devices import H200
from dsi.compiler.observe import collecting

from bench import audit
from tests.gpu import test_int8, test_kernels, test_models

pytestmark = pytest.mark.slow

F16 = torch.float16


def compiles(spec, kernel) -> None:
    for found in audit.looked_at(spec, kernel, H200.capability):
        assert not found.problem, f"{kernel.schedule} {kernel.name}: {found.problem}\n{kernel.source}"
        assert found.shared <= H200.shared, f"{kernel.schedule} {found.entry}: {found.shared} bytes of shared memory\n{kernel.source}"


@pytest.fixture
def compile_only(monkeypatch):
    monkeypatch.setattr(test_kernels, "check", lambda case, choice, folder: compiles(case.spec, generate(case.spec, choice)[0]))


@pytest.mark.parametrize("dtype", [torch.float32, F16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", test_kernels.CASES)
def test_linears(name, dtype, compile_only, tmp_path):
    test_kernels.test_linears(name, dtype, tmp_path)


@pytest.mark.parametrize("group", [0, 128, 40])
@pytest.mark.parametrize("name", test_kernels.CASES)
def test_int8_linears(name, group, compile_only, tmp_path):
    test_kernels.test_int8(name, group, tmp_path)


@pytest.mark.parametrize("peel", ["last", "first"])
@pytest.mark.parametrize("name", test_kernels.CASES)
def test_peeled(name, peel, compile_only, tmp_path):
    test_kernels.test_peeled(name, peel, tmp_path)


def test_rows_rounded_to_int8(compile_only, tmp_path):
    test_kernels.test_rows_rounded_to_int8(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads, d", [((4, 1), 128), ((2, 2), 64), ((2, 2), 152)], ids=str)
def test_attention_over_a_cache(dtype, heads, d, compile_only, tmp_path):
    test_kernels.test_attention_over_a_cache(dtype, (129, 77), heads, d, tmp_path)


@pytest.mark.parametrize("live", ["parts", "seen", "dealt"])
@pytest.mark.parametrize("heads, d, dtype", [((2, 2), 64, torch.float16), ((8, 2), 128, torch.bfloat16)], ids=str)
def test_attention_whose_programs_know_who_has_keys(live, heads, d, dtype, compile_only, tmp_path):
    test_kernels.test_attention_whose_programs_know_who_has_keys(live, (128, 129), heads, d, dtype, tmp_path)


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"mask": "bool"}, {"causal": True, "window": 70, "softcap": 20.0, "sinks": True}], ids=str
)
@pytest.mark.parametrize("d", [64, 80, 128])
def test_attention_of_a_prompt(options, d, compile_only, tmp_path):
    test_kernels.test_attention_of_a_prompt(options, d, tmp_path)


def check_regions(contexts) -> None:
    """Every region's variants, as an H200 that has tuned nothing gets them."""
    seen = set()
    for region in (region for context in contexts for region in context.report.regions):
        if region.spec is None or region.key in seen:
            continue
        seen.add(region.key)
        for _, kernel in audit.kernels_of(region, H200):
            compiles(region.spec, kernel)
    assert seen


@pytest.mark.parametrize("int8", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, F16], ids=str)
@pytest.mark.parametrize("name", test_models.DECODERS)
def test_decoders(name, dtype, int8):
    """A prompt and decode steps over a static cache, or a row and a batch without one."""
    model = zoo.decoder(name, dtype)
    options = {"executor": "reference", "library": False, **({"dtype": "int8"} if int8 else {})}
    compiled = torch.compile(model, backend="dsi", options=options)
    with torch.no_grad(), collecting() as contexts:
        if int8:
            for rows in ((1, 1), (3, 12)):
                compiled(input_ids=torch.ones(rows, dtype=torch.int64), use_cache=False)
        else:
            cache = transformers.StaticCache(config=model.config, max_cache_len=test_models.CACHE)
            test_models.logits(compiled, model, torch.ones(3, 12, dtype=torch.int64), cache)
    check_regions(contexts)


@pytest.mark.parametrize("rows", (1, 4, 16, 64, 200))
@pytest.mark.parametrize("grouping", test_int8.GROUPS)
def test_rows_and_groups(rows, grouping):
    options, _ = test_int8.GROUPS[grouping]
    model = torch.nn.Sequential(torch.nn.RMSNorm(160), torch.nn.Linear(160, 208), torch.nn.GELU(), torch.nn.Linear(208, 160)).half().eval()
    compiled = torch.compile(
        copy.deepcopy(model), backend="dsi", options={"executor": "reference", "dtype": "int8", "library": False, **options}
    )
    with torch.no_grad(), collecting() as contexts:
        compiled(torch.randn(rows, 160).half())
    check_regions(contexts)
