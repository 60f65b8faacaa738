"""Attention kernels whose programs know which parts hold keys that rows see: the others take no part, and one that is alone needs none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from dsi.codegen import Choice, generate
from dsi.codegen.devices import H200
from dsi.ir import tile as t
from dsi.ir.tolerances import disagreement

from . import plans
from .support import check, op, resources
from .test_attention import BATCH, KEYS, MASKS, added, case_of, prefix
from .test_golden import FOLDER

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LIVE = ("parts", "seen", "dealt")
# Five blocks of 16 keys, one a program (of which two have none).
DECODE = Choice("attention_decode", None, 16, 16, 1, 128, 4, 1, 8, live="parts")
SEVERAL = replace(DECODE, split=2, num_stages=2, live="dealt")  # blocks a program
GENERATOR = torch.Generator().manual_seed(11)


def blocks(shown: str, batch: int = 1, keys: int = KEYS, queries: int = 1) -> torch.Tensor:
    """[batch, 1, queries, keys]: of the blocks of 16 keys that are "1", some keys at random and one at least; of others none."""
    mask = torch.rand(batch, 1, queries, keys, generator=GENERATOR) < 0.5
    for number, digit in enumerate(shown):
        here = mask[..., number * 16 : number * 16 + 16]
        here &= digit == "1"
        here[..., 3] = digit == "1"
    return mask


@pytest.mark.parametrize("name", [name for name in MASKS if "border" not in name and "key" not in name.split()])
def test_masks(interpreter, name):
    """One block of keys a program and several, looked at in one step and in many, by matrix units and without."""
    check(case_of(name, queries=1), interpreter, choice=DECODE)
    check(case_of(name), interpreter, choice=replace(DECODE, block_m=8, block_s=32, live="seen"))
    check(case_of(name, queries=1, symbolic=True), interpreter, choice=replace(SEVERAL, block_m=2, num_stages=1))


@pytest.mark.parametrize("shown", ["00000", "10000", "00001", "00100", "01010", "10001", "11111"])
@pytest.mark.parametrize("live, block_m, dtype", [("parts", 1, F16), ("seen", 1, F16), ("parts", 16, BF16), ("dealt", 16, BF16)])
def test_parts_with_keys(interpreter, shown, live, block_m, dtype):
    case = plans.attention(dtype, 1, 2, 2, 1, KEYS, 24, mask=blocks(shown))
    check(case, interpreter, choice=replace(DECODE, block_m=block_m, live=live, early=block_m == 1))


@pytest.mark.parametrize("live", LIVE)
def test_entries_of_a_batch_have_parts_of_their_own(interpreter, live):
    """One entry sees nothing, one a part, one all; heads in groups of an odd size, and several queries that see different parts."""
    mask = torch.cat([blocks(shown) for shown in ("00000", "00010", "11111")])
    case = plans.attention(F32, 3, 6, 2, 1, KEYS, 24, 40, mask=mask, sinks=True)
    check(case, interpreter, choice=replace(DECODE, block_m=4, live=live))
    mask = torch.cat([blocks(shown, queries=1) for shown in ("01000", "00001", "00000")], 2)
    case = plans.attention(F32, 1, 6, 2, 3, KEYS, 24, mask=added(mask), softcap=3.0)
    check(case, interpreter, choice=replace(DECODE, live=live, block_m=4, block_k=16))


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"causal": True, "window": 20}, {"window": 3}, {"softcap": 2.0}, {"bias": True}, {"sinks": True}], ids=str
)
def test_what_attention_may_be_told(interpreter, options, live):
    symbolic = live == "dealt"
    case = plans.attention(F32, 2, 4, 2, 3, 40, symbolic=symbolic, mask="additive" if symbolic else "bool", strided=True, **options)
    check(case, interpreter, choice=replace(DECODE, split=4, block_m=8, block_s=16, live=live))


@pytest.mark.parametrize(
    "live, split, keys, dtype",
    [
        ("seen", 1, 16, F16),
        ("dealt", 1, 64, F32),
        ("parts", 2, 250, BF16),
        ("parts", 16, 250, F16),
        ("parts", 31, 40, F32),
        ("parts", 32, 40, F32),  # more than an integer has bits for: they are dealt out
        ("dealt", 16, 600, F32),
    ],
)
def test_any_number_of_programs(interpreter, live, split, keys, dtype):
    case = plans.attention(dtype, 2, 4, 1, 1, keys, mask="bool")
    check(case, interpreter, choice=replace(DECODE, block_m=4, split=split, live=live))


@pytest.mark.parametrize("live", ["", *LIVE])
@pytest.mark.parametrize("dtype, d, warps, chunks", [(F16, 64, 2, 1), (BF16, 24, 4, 1), (F16, 64, 1, 3)])
def test_a_softmax_a_warp(interpreter, dtype, d, warps, chunks, live):
    """Joined once: where the keys of a warp, or of all, are hidden, too; of one block of keys, and of several that are taken as one."""
    for shown, more in (("01000", {"sinks": True}), ("11011", {"softcap": 2.0})):
        case = plans.attention(dtype, 1, 2, 2, 1, KEYS, d, mask=blocks(shown), **more)
        choice = replace(
            DECODE, block_m=1, block_n=32 if chunks == 1 else 8, split=4, num_warps=warps, live=live, early=warps < 4, by_warp=True
        )
        check(case, interpreter, choice=replace(choice, block_s=128 if live else 1, chunks=chunks))


def test_chunks_are_parts(interpreter):
    """48 keys a part: two of them meet, one is alone; asked for ahead are all three blocks of one."""
    for shown in ("00100", "00010", "01010"):
        case = plans.attention(F16, 1, 2, 2, 1, KEYS, 64, mask=blocks(shown))
        choice = replace(DECODE, block_m=1, split=2, num_warps=2, early=True, by_warp=True, chunks=3, prefetch=128)
        (kernel,) = generate(case.spec, choice, H200)
        assert kernel.source.count("prefetch.global.L2 [$1]") == 6 and "1 << (j_seen // (3 * BLOCK_J))" in kernel.source
        check(case, interpreter, kernel)


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("name", ["left padding", "window", "added, left padding", "none"])
def test_parts_without_keys_are_no_part_of_a_sum(interpreter, name, live):
    """A value that is no number would spoil every sum that it enters, by a weight of 0 too; so would one that a part never left."""
    case, mask = case_of(name), MASKS[name]
    seen = (mask if mask.dtype == torch.bool else mask == 0).expand(BATCH, 1, 3, KEYS).any(2)
    for entry in range(BATCH):
        for start in range(0, KEYS, 16):
            if not seen[entry, 0, start : start + 16].any():
                case.inputs[1][entry, :, start : start + 16] = float("nan")
                case.inputs[2][entry, :, start : start + 16] = float("nan")
    if name == "none":  # the first part is all there is
        case.inputs[2][:, :, :16] = 0.0
    check(case, interpreter, choice=replace(DECODE, block_m=8, live=live))


@pytest.mark.parametrize("live", ["seen", "dealt"])
def test_hidden_keys_are_not_read(interpreter, live):
    """Within a block, too: those that no row sees, or those behind the last that one does."""
    mask = prefix((5, 37), left=(20, 0)) & (torch.arange(KEYS) % 3 > 0)
    case = plans.attention(F16, BATCH, 4, 2, 1, KEYS, mask=mask)
    hidden = ~mask[:, 0, 0] if live == "seen" else torch.arange(KEYS)[None] > torch.tensor([24, 36])[:, None]
    for tensor in case.inputs[1:3]:
        tensor.masked_fill_(hidden[:, None, :, None], float("nan"))
    check(case, interpreter, choice=replace(DECODE, block_m=2, live=live))
    if live == "seen":  # by one program, too, which meets nobody
        check(case, interpreter, choice=replace(DECODE, block_m=2, live=live, block_n=128, split=1, block_s=1))


def test_a_mask_computed_from_positions(interpreter):
    case = plans.attention(F32, 1, 4, 2, 1, KEYS, mask=prefix((17,), left=(0,)))
    where = case.input("position", (), dtype=torch.int64, values=torch.tensor(16))
    case.spec.plan = replace(case.spec.plan, mask=op("le", t.Index(t.J), case.load(where), dtype=torch.bool))
    case.inputs[2][:, :, 32:] = float("nan")
    for live in LIVE:
        check(case, interpreter, choice=replace(DECODE, block_m=2, live=live))


@pytest.mark.parametrize("live", ["", *LIVE])
def test_launch_after_launch_with_the_same_counters(interpreter, live):
    """Steps of a sequence that grows, then shrinks: what a launch leaves in the workspace is not taken for another's; one part that is
    alone leaves nothing there."""
    case = plans.attention(F32, 2, 2, 2, 1, 64, mask=prefix((64, 64), 64))
    (kernel,) = generate(case.spec, replace(DECODE, block_m=1, split=4, live=live), H200)
    (launch,) = kernel.launches
    partial, arrived = (torch.full((int(w.size),), 0 if w.zeroed else 1e9, dtype=getattr(torch, w.dtype)) for w in kernel.workspaces)
    constants = {**launch.constants, "PDL": False}
    for lives in ((16, 1), (17, 33), (64, 48), (0, 3), (64, 64), (64, 64)):
        mask = prefix(lives, 64)
        case.inputs[3].copy_(mask)
        q, k, v = (x.double() for x in case.inputs[:3])
        scores = (q @ k.mT * case.spec.plan.scale).masked_fill(~mask, float("-inf"))
        expected = (scores.softmax(-1).nan_to_num(0.0) @ v).transpose(1, 2).reshape(case.outputs[0].shape).float()
        before = partial.clone()
        tensors = {"input": case.inputs, "output": [torch.full_like(case.outputs[0], float("nan"))], "workspace": [partial, arrived]}
        arguments = [tensors[a.kind][a.number] for a in launch.arguments]
        *_, out, partial, arrived = interpreter.run(kernel.source, launch.entry, tuple(map(int, launch.grid)), arguments, constants)
        assert not disagreement(out, expected) and not arrived.any()
        if live and max(lives) <= 16:
            assert torch.equal(partial, before)


@pytest.mark.parametrize("live", LIVE)
def test_without_a_mask_to_look_at_all_meet(live):
    """Then a kernel is the one that it is without."""
    for more in ({}, {"mask": MASKS["no keys told apart"]}):
        spec = plans.attention(F32, BATCH, 4, 2, 3, KEYS, **more).spec
        sources = [generate(spec, replace(DECODE, live=way), H200)[0].source for way in ("", live)]
        assert sources[0] == sources[1]


def test_other_ways_are_refused():
    spec = plans.attention(F16, 1, 2, 2, 1, KEYS, mask="bool").spec
    with pytest.raises(ValueError, match="live='everyone'; known ways: parts, seen, dealt"):
        generate(spec, replace(DECODE, live="everyone"), H200)
    with pytest.raises(ValueError, match="0 chunks of keys"):
        generate(spec, replace(DECODE, chunks=0), H200)


def test_source(golden):
    with torch.device("meta"):
        spec = plans.attention(F16, 1, 12, 12, 1, 512, 64, mask="bool").spec
    choice = replace(DECODE, block_m=1, block_n=128, split=4, num_warps=8, block_s=512, early=True, by_warp=True)
    golden(FOLDER / "attention_decode_live.txt", generate(spec, choice, H200)[0].source)


def test_what_comes_before_the_wait(interpreter):
    """A kernel that overlaps the one before it lets the next one start behind its wait, and reads nothing before it but the mask, past the
    L1 cache; what it asks for is what the mask shows."""
    case = plans.attention(F16, 2, 2, 2, 1, 64, 64, mask=prefix((20, 50), 64))
    choice = replace(DECODE, block_m=1, split=4, prefetch=128, overlaps=True, hint=True)
    (kernel,) = generate(case.spec, choice, H200)
    before, behind = kernel.source.split("gdc_wait()\n", 1)
    assert "gdc_launch_dependents()" not in before.split("def attention")[1] and "gdc_launch_dependents()" in behind.splitlines()[0]
    (load,) = (line for line in before.splitlines() if "tl.load" in line)
    assert load.split(" = ")[0].strip() == "j_ahead_in" and 'cache_modifier=".cg"' in load and before.count("prefetch.global.L2 [$1]") == 2
    assert kernel.launches[0].options["launch_pdl"] is True
    (late,) = generate(case.spec, replace(choice, overlaps=False, hint=False), H200)
    assert "tl.load" not in late.source.split("gdc_wait()\n")[0] and "launch_pdl" not in late.launches[0].options
    check(case, interpreter, kernel)


@pytest.mark.parametrize("live", ["", *LIVE])
def test_a_mask_that_is_computed_hides_as_one_that_is_loaded(interpreter, live):
    """Keys up to a position, compared where scores are made and where live keys are looked for."""
    case = plans.attention(F16, BATCH, 4, 2, 1, KEYS, 64, mask="positions", seed=3)
    check(case, interpreter, choice=replace(DECODE, block_m=2, live=live, early=live == "seen"))
    case = plans.attention(F32, BATCH, 4, 2, 3, KEYS, 24, mask="positions", symbolic=True)
    check(case, interpreter, choice=replace(SEVERAL, block_m=16, live=live))


@pytest.mark.parametrize("written", [False, True])
def test_what_is_asked_for_before_the_wait_is_what_a_computed_mask_shows(interpreter, written):
    """If nothing in the graph writes the position; else it may be read behind the wait only, and nothing is asked for."""
    case = plans.attention(F16, 2, 2, 2, 1, 64, 64, mask="positions")
    position = next(number for number, tensor in enumerate(case.spec.inputs) if tensor.name == "positions")
    spec = replace(case.spec, constants=frozenset() if written else frozenset((position,)))
    (kernel,) = generate(spec, replace(DECODE, block_m=1, split=4, prefetch=128, overlaps=True, hint=True), H200)
    before = kernel.source.split("gdc_wait()\n", 1)[0]
    loads = [line for line in before.splitlines() if "tl.load" in line]
    assert [line.count("tl.load(positions_ptr") for line in loads] == ([] if written else [1])
    assert ("j_ahead_in = j_ahead_in & " in before) == (not written) and before.count("prefetch.global.L2 [$1]") == (0 if written else 2)
    check(case, interpreter, kernel)


@pytest.mark.parametrize("mask", [added(prefix((20, 50))), torch.rand(1, 4, 1, KEYS, generator=GENERATOR) < 0.5], ids=["added", "heads"])
def test_a_mask_that_is_no_hint(mask):
    """One that is added, or that heads of a group have each their own: all keys are asked for."""
    spec = plans.attention(F16, BATCH, 4, 2, 1, KEYS, 64, mask=mask).spec
    hinted, not_hinted = (generate(spec, replace(DECODE, block_m=2, prefetch=128, hint=hint), H200)[0].source for hint in (True, False))
    assert hinted == not_hinted and "prefetch.global.L2" in hinted


@pytest.mark.parametrize("live", LIVE)
def test_loads_come_before_what_waits_for_them(live):
    """Compiled for the H200, without spills; all loads of keys and values are under way before the barrier that scores are computed
    behind."""
    with torch.device("meta"):
        case = plans.attention(F16, 1, 12, 12, 1, 512, 64, mask="bool")
    choice = replace(DECODE, block_m=1, block_n=128, split=4, num_warps=8, block_s=512, live=live, early=True, by_warp=True)
    (kernel,) = generate(case.spec, choice, H200)
    used = resources(case, kernel, 90)
    assert used["STACK"] == used["LOCAL"] == 0
    lines = kernel.source.splitlines()
    (barrier,) = (number for number, line in enumerate(lines) if line == "    tl.debug_barrier()")
    where = {name: next(n for n, line in enumerate(lines) if line.startswith(f"    {name} = tl.load")) for name in ("q", "k", "v")}
    assert max(where["k"], where["v"]) < barrier < where["q"]
