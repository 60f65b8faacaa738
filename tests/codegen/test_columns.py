"""How segments are cut: every column is computed once, and rope needs no value to change its lane."""

from __future__ import annotations

import pytest
import sympy
import torch
from dsi.codegen.columns import U, columns_of
from dsi.codegen.integers import normalise
from dsi.ir import tile as t

from . import plans


def segments(**options):
    return plans.neox_qkv(torch.float32, **options).spec.plan.segments


def columns_in(sets) -> list[int]:
    found = []
    for columns in sets:
        for part in range(columns.parts):
            column = columns.column(part)
            found += [int(normalise(column.xreplace({U: sympy.Integer(u)}))) for u in range(int(columns.positions))]
    return found


@pytest.mark.parametrize("rotary", [2, 4, 8, 10, 20])
def test_every_column_once(rotary):
    for segment in segments(rotary=rotary):
        assert sorted(columns_in(columns_of(segment))) == list(range(40))


def test_half_split_rope_has_two_parts():
    (columns,) = columns_of(segments(rotary=20)[0])
    assert (columns.parts, columns.lanes, columns.held) == (2, 10, False)


def test_channels_behind_rope_are_a_set_of_their_own():
    turned, rest = columns_of(segments(d=80, rotary=20, heads=1)[0])
    assert (turned.offset, turned.parts, turned.lanes) == (0, 2, 10)
    assert (rest.offset, rest.parts, rest.lanes) == (20, 1, 60)


def test_interleaved_rope_has_parts_of_even_and_odd_columns():
    plan = plans.llama_qkv(torch.float32, style="interleaved").spec.plan
    (columns,) = columns_of(plan.segments[0])
    assert [columns.column(part) for part in (0, 1)] == [2 * U, 2 * U + 1]


def test_a_norm_over_heads_holds_whole_heads():
    plan = plans.llama_qkv(torch.float32, d=24, qk_norm=True).spec.plan
    (columns,) = columns_of(plan.segments[0])
    assert (columns.parts, columns.lanes, columns.padded, columns.held) == (2, 12, 16, True)
    assert columns.width(64) == 4 * 12


def test_without_permutations_nothing_is_held():
    (columns,) = columns_of(segments()[2])
    assert (columns.parts, columns.held) == (1, False) and columns.column(0) == U and t.C != U
