"""Attention kernels: keys spread over programs, keys that no row sees, heads of any size, under the interpreter against plain torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.codegen.cost import candidates, predict
from dsi.codegen.devices import A100, H200
from dsi.ir import tile as t

from . import plans
from .support import check, op, resources

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=["fp32", "fp16", "bf16"])
DEVICES = {80: A100, 90: H200}
SHARED = {capability: device.shared for capability, device in DEVICES.items()}
BATCH, QUERIES, KEYS = 2, 3, 70


def prefix(live: tuple[int, ...], keys: int = KEYS, left: tuple[int, ...] = (0, 0)) -> torch.Tensor:
    """[batch, 1, 1, keys]: each entry's own live keys, after its own padding."""
    j = torch.arange(keys)
    return torch.stack([(j >= start) & (j < start + some) for some, start in zip(live, left, strict=True)])[:, None, None]


def after(position: int, queries: int = QUERIES, keys: int = KEYS, window: int = 1000) -> torch.Tensor:
    """[1, 1, queries, keys]: queries from `position` on see the keys up to their own."""
    i, j = torch.arange(queries)[:, None] + position, torch.arange(keys)[None, :]
    return ((j <= i) & (j > i - window))[None, None]


def added(mask: torch.Tensor, value: float = float("-inf")) -> torch.Tensor:
    return torch.where(mask, 0.0, value)


GENERATOR = torch.Generator().manual_seed(7)
MASKS = {
    "all": prefix((KEYS, KEYS)),
    "one key": prefix((1, 1)),
    "last key": prefix((1, 1), left=(KEYS - 1, KEYS - 1)),
    "border": prefix((16, 32)),
    "behind a border": prefix((17, 33)),
    "left padding": prefix((20, 40), left=(30, 17)),
    "none in one entry": prefix((0, 9)),
    "none": prefix((0, 0)),
    "positions": after(40),
    "window": after(40, window=20),
    "first query sees none": after(40) & (torch.arange(QUERIES) > 0)[:, None],
    "every head its own": torch.arange(KEYS) < torch.tensor([3, 70, 0, 33])[None, :, None, None],
    "random": torch.rand(BATCH, 4, QUERIES, KEYS, generator=GENERATOR) < 0.5,
    "holes": torch.rand(BATCH, 1, QUERIES, KEYS, generator=GENERATOR) < 0.05,
    "no keys told apart": torch.tensor([True, False, True])[None, None, :, None],
    "added": added(after(40)),
    "added, left padding": added(prefix((20, 40), left=(30, 17))),
    "added, lowest number": added(after(40), torch.finfo(F32).min),
    "added, a row of lowest numbers": torch.full((1, 1, QUERIES, KEYS), torch.finfo(F32).min),
    "added, none": added(prefix((0, 9))),
    "added, nan": torch.where(torch.arange(KEYS) == 50, float("nan"), float("-inf"))[None, None, None],
}
DECODE = Choice("attention_decode", None, 16, 16, 1, 64, 4, 2, 2)
PREFILL = Choice("attention", None, 16, 16, 1, 64, 4, 2)
LLAMA, GPT2, ODD = dict(heads=32, kv_heads=8, d=128), dict(heads=12, kv_heads=12, d=64), dict(heads=28, kv_heads=28, d=152)


def case_of(name: str, dtype: torch.dtype = F32, queries: int = QUERIES, symbolic: bool = False, heads: int = 4, kv_heads: int = 2, **more):
    """Attention under a mask by name."""
    return plans.attention(dtype, BATCH, heads, kv_heads, queries, KEYS, mask=MASKS[name][:, :, :queries], symbolic=symbolic, **more)


@pytest.mark.parametrize("name", MASKS)
def test_masks_with_keys_over_several_programs(interpreter, name):
    """Scanned at once, in steps, and not at all; by matrix units and without."""
    check(case_of(name, queries=1), interpreter, choice=DECODE)
    check(case_of(name, queries=1, symbolic=True), interpreter, choice=replace(DECODE, block_m=2, split=1, num_stages=3))
    check(case_of(name, symbolic=True), interpreter, choice=replace(DECODE, block_m=8, block_s=32))


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_many_queries(interpreter, name):
    heads = (4, 2) if MASKS[name].shape[1] > 1 else (3, 1)
    check(case_of(name, symbolic=True), interpreter, choice=PREFILL)
    check(case_of(name, heads=heads[0], kv_heads=heads[1]), interpreter, choice=replace(PREFILL, block_n=32, block_s=128))


@pytest.mark.parametrize("name", ["left padding", "random", "added, lowest number"])
def test_masks_that_are_not_scanned(interpreter, name):
    check(case_of(name), interpreter, choice=replace(DECODE, block_s=1, split=4))
    check(case_of(name), interpreter, choice=replace(PREFILL, block_s=1))


@pytest.mark.parametrize("dtype, block_m", [(F32, 1), (BF16, 1), (F16, 16), (BF16, 16)])
@pytest.mark.parametrize("d, dv, block_k", [(16, 16, 1), (24, 40, 16), (80, 80, 64), (152, 152, 128), (8, 8, 1)])
def test_heads_in_parts(interpreter, dtype, block_m, d, dv, block_k):
    """Head sizes that are no power of two, whole and in parts, for one row of a key head."""
    case = plans.attention(dtype, 1, 2, 2, 1, KEYS, d, dv, mask="bool")
    check(case, interpreter, choice=replace(DECODE, block_m=block_m, block_k=block_k))


@DTYPES
def test_many_queries_of_heads_in_parts(interpreter, dtype):
    case = plans.attention(dtype, 1, 4, 2, 37, 37, 80, causal=True, window=20)
    check(case, interpreter, choice=replace(PREFILL, block_k=64, block_n=32))


@pytest.mark.parametrize("split, keys, dtype", [(1, 48, F16), (2, 16, F32), (2, 32, BF16), (4, 64, F16), (8, 100, F32), (16, 250, BF16)])
@pytest.mark.parametrize("block_m", [4, 16])
def test_any_number_of_programs(interpreter, dtype, split, keys, block_m):
    """One block of keys a program, several, or none for some; parts that are all joined, in a loop where they are many."""
    case = plans.attention(dtype, 2, 4, 1, 1, keys, mask="bool")
    check(case, interpreter, choice=replace(DECODE, block_m=block_m, split=split, block_s=1))


@pytest.mark.parametrize("live", [1, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize("block_m", [1, 16])
def test_live_lengths_around_borders_of_blocks(interpreter, live, block_m):
    case = plans.attention(F16, BATCH, 2, 2, 1, 64, mask=prefix((live, 65 - live), 64))
    check(case, interpreter, choice=replace(DECODE, block_m=block_m))


@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window": 3}, {"window": 2}, {"softcap": 2.0}, {"bias": True}], ids=str
)
@pytest.mark.parametrize("block_m", [8, 16])
def test_what_attention_may_be_told(interpreter, options, block_m):
    for symbolic in (False, True):
        case = plans.attention(F32, 1, 4, 2, 9, 40, symbolic=symbolic, mask="bool" if symbolic else "none", strided=True, **options)
        check(case, interpreter, choice=replace(DECODE, block_m=block_m, block_s=16))


@pytest.mark.parametrize("choice", [PREFILL, replace(DECODE, block_m=1, split=1), DECODE], ids=str)
@pytest.mark.parametrize("mask", ["bool", "additive"])
@pytest.mark.parametrize("dtype, keys", [(F32, 40), (BF16, 12)])
def test_sinks(interpreter, choice, mask, dtype, keys):
    """One more key a head, of no value: in keys of one program, of several that are joined, and in a row that sees no other."""
    queries = 1 if choice.block_m == 1 else 9
    case = plans.attention(dtype, 1, 4, 4 if queries == 1 else 2, queries, keys, sinks=True, mask=mask)
    check(case, interpreter, choice=choice)


@pytest.mark.parametrize("choice", [DECODE, replace(DECODE, block_m=8), PREFILL, replace(PREFILL, block_n=32)], ids=str)
@pytest.mark.parametrize("name", ["left padding", "window", "positions", "added, left padding", "none"])
def test_blocks_that_no_row_sees_are_not_read(interpreter, name, choice):
    """A value that is no number would spoil every sum that it enters, by a weight of 0 too."""
    case = case_of(name)
    mask = MASKS[name]
    seen = (mask if mask.dtype == torch.bool else mask == 0).expand(BATCH, 1, QUERIES, KEYS).any(2)
    for entry in range(BATCH):
        for start in range(0, KEYS, choice.block_n):
            if not seen[entry, 0, start : start + choice.block_n].any():
                case.inputs[1][entry, :, start : start + choice.block_n] = float("nan")
                case.inputs[2][entry, :, start : start + choice.block_n] = float("nan")
    check(case, interpreter, choice=choice)


def test_a_mask_computed_from_positions(interpreter):
    """What a model writes as arange <= position stays in the kernel, and is scanned as any other."""
    case = plans.attention(F32, 1, 4, 2, 1, KEYS, mask=after(40, 1))
    where = case.input("position", (), dtype=torch.int64, values=torch.tensor(40))
    case.spec.plan = replace(case.spec.plan, mask=op("le", t.Index(t.J), case.load(where), dtype=torch.bool))
    case.inputs[2][:, :, 48:] = float("nan")
    check(case, interpreter, choice=replace(DECODE, block_s=32))


@pytest.mark.parametrize(
    "make, rows",
    [
        (lambda: plans.attention(BF16, 1, 32, 8, 1, 4096, 128, mask="bool"), 1),
        (lambda: plans.attention(F16, 1, 12, 12, 1, 512, 64, mask="bool"), 1),
        (lambda: plans.attention(F32, 1, 28, 28, 1, 1024, 152, mask="bool"), 1),
        (lambda: plans.attention(BF16, 1, 32, 8, 5, 512, 128, symbolic=True), 16),
        (lambda: plans.attention(BF16, 1, 32, 8, 512, 512, 128, mask="bool"), None),
    ],
    ids=["llama", "gpt2", "odd", "some queries", "prompt"],
)
def test_candidates_are_varied_and_rank(make, rows):
    with torch.device("meta"):
        spec = make().spec
    found = candidates(spec, rows)
    assert 10 <= len(found) <= 40 and len(set(found)) == len(found)
    times = [predict(spec, choice) for choice in found]
    assert times == sorted(times) and times[0] > 0
    decode = [choice for choice in found if choice.schedule == "attention_decode"]
    if rows == 1:
        assert len({choice.split for choice in decode}) >= 3 and {choice.num_warps for choice in decode} == {4, 8}


def test_a_large_cache_is_scanned_in_every_choice():
    """What is measured on a full cache must not be slow on one that is nearly empty."""
    with torch.device("meta"):
        spec = plans.attention(BF16, 16, 32, 8, 1, 4096, 128, mask="bool").spec
    assert all(choice.block_s > 1 for choice in candidates(spec))


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(
    "shape, choice",
    [
        (GPT2, replace(DECODE, block_m=1, block_n=64, block_s=1, num_stages=1, split=8)),
        (LLAMA, replace(DECODE, block_n=128, block_s=512, num_warps=8, num_stages=3)),
        (ODD, replace(DECODE, block_m=1, block_n=64, block_k=128, block_s=512, num_warps=8, num_stages=3)),
    ],
    ids=["gpt2", "llama", "odd"],
)
def test_no_spills(shape, choice, capability):
    with torch.device("meta"):
        case = plans.attention(BF16, 1, queries=1, keys=512, mask="bool", **shape)
    (kernel,) = generate(case.spec, choice, DEVICES[capability])
    used = resources(case, kernel, capability)
    assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= SHARED[capability]


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("queries", [1, 4, 512])
@pytest.mark.parametrize("shape", [GPT2, LLAMA, ODD, {**GPT2, "d": 80}, {**LLAMA, "d": 256}], ids=["gpt2", "llama", "odd", "80", "256"])
def test_no_spills_in_any_candidate(shape, queries, dtype, capability):
    with torch.device("meta"):
        case = plans.attention(dtype, 1, queries=queries, keys=1024, mask="bool", **shape)
    for choice in candidates(case.spec, device=DEVICES[capability])[:8]:
        (kernel,) = generate(case.spec, choice, DEVICES[capability])
        used = resources(case, kernel, capability)
        assert used["STACK"] == used["LOCAL"] == 0 and used["SHARED"] <= SHARED[capability], (choice, used)
