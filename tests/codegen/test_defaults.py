"""The table of measured choices: what is in it is taken, near shapes take it too, and nothing else does."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from dsi.codegen import Choice, cost, defaults
from dsi.codegen.devices import A100, H200
from dsi.codegen.linear_choices import admissible
from dsi.codegen.linear_cost import linear_seconds, linear_work
from dsi.ir import tile as t

from . import plans
from .quantised import constant, quantised
from .support import op
from .test_cost import LLAMA, on_meta

BF16 = torch.bfloat16
GEMV = Choice("gemv", None, 1, 8, 512, 4096, 8, 1)
SKINNY = Choice("skinny", None, 16, 64, 128, 256, 4, 4, 2, 256)


def projection(rows, inner=4096, columns=4096, dtype=BF16, **more):
    return on_meta(lambda: plans.projection(dtype, rows, inner, columns, strided=False, **more))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Writes measurements [(specification, choice, rows)] as the table that ships."""

    def put(*measured, device="NVIDIA H200"):
        file = tmp_path / "defaults.json"
        for spec, choice, *rows in measured:
            defaults.write(file, device, [defaults.entry(spec, choice, 9.5, *rows)])
        found = defaults.read(file)
        monkeypatch.setattr(defaults, "table", lambda: found)
        return file

    return put


def test_the_table_that_ships_can_be_read_and_its_choices_made():
    for entries in defaults.table().values():
        assert len({entry.key for entry in entries}) == len(entries)
        for entry in entries:
            choice = Choice(**{"max_rows": None, **entry.choice})
            assert choice.schedule in ("gemv", "skinny", "tiled", "library")
            assert choice.schedule == "library" or choice.block_n >= entry.held
            in_blocks = choice.schedule == "skinny" and choice.digits == 2 and choice.split == 1
            assert in_blocks or choice.schedule in ("tiled", "library") or choice.block_m >= entry.rows


def measured(entry: defaults.Entry) -> t.KernelSpec:
    """A linear that an entry is for."""

    def make():
        if entry.sums == 2:
            return plans.gate_up(BF16, entry.rows, entry.inner, entry.columns // 2)
        return plans.projection(BF16, entry.rows, entry.inner, entry.columns, strided=False, kn=entry.across)

    with torch.device("meta"):
        spec = constant(quantised(make) if entry.weight_bytes == 1 else make()).spec
    if entry.sums == 1 and entry.norm:
        x = spec.plan.x
        normed = op("mul", op("sub", x, t.Statistic(0, "mean")) if entry.norm == "layer" else x, t.Statistic(0, "rstd"))
        reduction = t.Reduction(entry.norm, x, t.K, spec.plan.inner, 1e-5)
        spec = dataclasses.replace(spec, plan=dataclasses.replace(spec.plan, x=normed, reductions=(reduction,)))
    return dataclasses.replace(spec, library=entry.choice["schedule"] == "library")


def test_each_entry_that_ships_is_found_for_what_it_was_measured_for():
    """An estimate of registers that grew once hid int8's choices for one row; those for four took their place, at twice their time."""
    for entry in defaults.table()["H200"]:
        spec, wanted = measured(entry), Choice(**{"max_rows": None, **entry.choice})
        assert defaults.entry(spec, wanted, 1.0).key == entry.key
        found = defaults.lookup(spec, None, "H200")
        assert found is not None and dataclasses.replace(found, block_s=wanted.block_s) == wanted, (entry, found)


def test_what_was_measured_is_taken(table):
    table((projection(1), GEMV))
    assert defaults.lookup(projection(1), None, "NVIDIA H200 sm_90") == GEMV
    assert cost.choices(projection(1), H200) == (GEMV,)
    assert cost.choices(projection(1), A100) != (GEMV,)  # another device


def test_near_shapes_take_it_too(table):
    table((projection(1), GEMV), (projection(1, columns=16384), dataclasses.replace(GEMV, block_n=16)))
    assert defaults.lookup(projection(1, columns=5120), None, "H200").block_n == 8
    assert defaults.lookup(projection(1, columns=11008), None, "H200").block_n == 16
    assert defaults.lookup(projection(1, inner=768, columns=768), None, "H200") is None


def test_other_kinds_of_linears_do_not(table):
    table((projection(1), GEMV))
    assert defaults.lookup(projection(1, dtype=torch.float32), None, "H200") is None
    assert defaults.lookup(projection(1, kn=True), None, "H200") is None
    assert defaults.lookup(on_meta(lambda: plans.gate_up(BF16, 1, 4096, 2048)), None, "H200") is None  # two sums side by side
    assert defaults.lookup(on_meta(lambda: plans.post_norm(BF16, symbolic=True)), None, "H200") is None


def test_another_norm_counts_less_than_another_kind(table):
    table((projection(1), GEMV))
    assert defaults.lookup(on_meta(lambda: plans.gpt2_qkv(BF16, 1, 1, 64, 64)), None, "H200") is None  # stored [K, N]
    spec = projection(1)
    normed = dataclasses.replace(
        spec, plan=dataclasses.replace(spec.plan, reductions=on_meta(lambda: plans.gate_up(BF16, 1)).plan.reductions)
    )
    assert defaults.lookup(normed, None, "H200") == GEMV


def test_what_was_measured_without_a_norm_gets_it_where_the_model_says(table):
    """As a head has it: a norm that thousands of programs repeat costs more than a kernel of its own; what was measured with it stays."""
    normed = on_meta(lambda: plans.gate_up(BF16, 1, 4096, 64000))
    load = next(part for part in t.parts_of(normed.plan.x) if isinstance(part, t.Load))
    table((dataclasses.replace(normed, plan=dataclasses.replace(normed.plan, x=load, reductions=())), GEMV))
    assert defaults.lookup(normed, None, "H200") == dataclasses.replace(GEMV, apart=True)
    table((normed, GEMV))
    assert defaults.lookup(normed, None, "H200") == GEMV


def test_a_norm_that_has_no_room_beside_the_tiles_is_a_kernel_of_its_own(table):
    """As an encoder's q, k, v at 128 rows, which went to a library because the way that was predicted to be faster did not fit."""
    normed = on_meta(lambda: plans.gpt2_qkv(BF16, 1, 128, 16, 64))
    load = next(part for part in t.parts_of(normed.plan.x) if isinstance(part, t.Load))
    tiled = Choice("tiled", None, 64, 64, 64, 64, 4, 4)
    work = linear_work(normed, 128, {})
    ways = {apart: dataclasses.replace(tiled, apart=apart) for apart in (True, False)}
    assert linear_seconds(work, ways[False], H200) < linear_seconds(work, ways[True], H200)
    assert admissible(work, ways[True], 128, H200) and not admissible(work, ways[False], 128, H200)
    table((dataclasses.replace(normed, plan=dataclasses.replace(normed.plan, x=load, reductions=())), tiled))
    assert defaults.lookup(normed, None, "H200") == ways[True]


def test_rows_take_a_block_that_holds_them(table):
    table((projection(16), SKINNY))
    for rows, found in ((4, True), (8, True), (16, True), (17, False), (1, False), (512, False)):
        assert (defaults.lookup(projection(rows), None, "H200") is not None) == found, rows
    symbolic = projection(1, symbolic=True)
    assert defaults.lookup(symbolic, 16, "H200") == dataclasses.replace(SKINNY, max_rows=16)
    assert defaults.lookup(symbolic, None, "H200") is None
    assert [choice.max_rows for choice in cost.choices(symbolic)] == [1, 4, 16, 32, 64, 256, None]


def test_many_rows_take_it_whatever_their_number(table):
    tiled = Choice("tiled", None, 128, 128, 64, 64, 8, 4)
    table((projection(512), tiled))
    assert defaults.lookup(projection(700), None, "H200") == tiled
    assert defaults.lookup(projection(1, symbolic=True), None, "H200") == tiled


def test_a_library_that_was_not_tried_may_be_predicted_to_win(table):
    spec = dataclasses.replace(projection(512, 14336), library=True)
    tiled = Choice("tiled", None, 128, 128, 64, 64, 8, 4)
    slow, fast, in_a_step = (defaults.entry(spec, tiled, us) for us in (300.0, 60.0, None))
    tried = defaults.entry(spec, tiled, 300.0, library=310.0)
    for entry, taken in ((slow, False), (fast, True), (tried, True), (in_a_step, True)):
        file = table((spec, tiled))
        defaults.write(file, "H200", [entry])
        found = defaults.read(file)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(defaults, "table", lambda found=found: found)
            assert (defaults.lookup(spec, None, "H200") == tiled) == taken
            assert defaults.lookup(dataclasses.replace(spec, library=False), None, "H200") == tiled
            assert cost.choices(spec)[0].schedule == ("tiled" if taken else "library")


def test_a_choice_that_cannot_be_this_linears_is_passed_over():
    spec = on_meta(lambda: plans.llama_qkv(BF16, 1, 1, qk_norm=True, **LLAMA))
    work = linear_work(spec, 1, {})
    assert work.held == 64 or work.held == 128
    assert not admissible(work, dataclasses.replace(GEMV, block_n=work.held // 2), 1, H200)
    assert not admissible(
        linear_work(projection(1), 1, {}), dataclasses.replace(SKINNY, block_n=256, block_k=512), 1, H200
    )  # shared memory
    assert not admissible(linear_work(projection(1, dtype=torch.float32), 1, {}), SKINNY, 1, H200)


def test_a_newer_measurement_replaces_an_older_one(table):
    file = table((projection(1), GEMV))
    faster = dataclasses.replace(GEMV, num_warps=4)
    table((projection(1), faster))
    (entry,) = defaults.read(file)["H200"]
    assert Choice(**{"max_rows": None, **entry.choice}).num_warps == Choice("gemv", None, 1, 1).num_warps
    assert len(file.read_text().splitlines()) == 5  # an entry a line


def test_a_write_that_is_broken_off_leaves_the_table_as_it_was(table, monkeypatch):
    """It ships, and no kernel is made without it."""
    file = table((projection(1), GEMV))
    before = file.read_text()

    def half(path, text, **more):
        with path.open("w", **more) as out:
            out.write(text[: len(text) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.write_text", half)
    with pytest.raises(KeyboardInterrupt):
        defaults.write(file, "H200", [defaults.entry(projection(1), dataclasses.replace(GEMV, num_warps=8), 1.0)])
    assert file.read_text() == before


def test_another_format_is_refused(tmp_path):
    file = tmp_path / "defaults.json"
    for text, named in (('{"format": 0, "devices": {}}', "format 0"), ("[]", "format list"), ('{"format": 1}', "devices")):
        file.write_text(text)
        with pytest.raises(ValueError, match=named):
            defaults.read(file)
    file.write_text('{"format": 1, "devices": {"H200": [{"rows": 1, "columns": 1, "inner": 1, "choice": {}, "us": 1, "blocks": 3}]}}')
    with pytest.raises(ValueError, match="blocks"):
        defaults.read(file)


def test_what_ran_on_the_device_fits_it_whatever_the_estimate(table):
    """An estimate that is too high once kept a measured choice out, and what took its place cost twice as much."""
    large = dataclasses.replace(SKINNY, block_n=256, block_k=512)
    assert not admissible(linear_work(projection(16), 16, {}), large, 16, H200)
    table((projection(16), large))
    assert defaults.lookup(projection(16), None, "H200") == large
    assert defaults.lookup(projection(16, columns=5120), None, "H200") is None  # near, but it did not run
