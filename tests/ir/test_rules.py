"""The ten region rules (docs/design.md): each refuses what it is for, in a sentence that names the node and the place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from dsi.ir.analysis import plan_region
from dsi.ir.errors import Refused

from .bodies import body_of, check, dsi

R = torch.randn


def refusal(function: Callable[..., Any], *inputs: Any, dynamic: tuple[int, ...] = (), kind: str | None = None) -> str:
    """The sentence with which a body is refused, with its rule."""
    with pytest.raises(Refused) as caught:
        plan_region(body_of(function, inputs, dynamic), kind)
    assert caught.value.refusal.node, "a refusal names its node"
    return f"{caught.value.refusal.rule}: {caught.value.refusal.reason}"


# --------------------------------------------------------------------------------------------------------- 1: atoms are not cut


def test_rule_1_a_view_that_cuts_an_atom_ends_the_region() -> None:
    def cuts(x, w):  # 3 rows of 10 columns seen as 5 rows of 6
        return dsi.linear(x, w).view(5, 6).t() * 2

    text = refusal(cuts, R(3, 4), R(10, 4))
    assert text == "region rule 1: mul regroups dimensions of linear so that they are cut: its row is ((o0_0_ + 6*o0_1_)//10)"


def test_rule_1_a_view_that_cuts_columns() -> None:
    def cuts(q, k, v):  # 6 channels of 4 heads seen as 8 groups of 3, of which 4 and 2 are told apart
        y = dsi.attention(q, k, v, None, None, scale=1.0).transpose(1, 2).reshape(1, 3, 24)
        return y.view(1, 3, 3, 8).transpose(2, 3) * 2

    text = refusal(cuts, R(1, 4, 3, 6), R(1, 2, 5, 6), R(1, 2, 5, 6))
    assert text == "region rule 1: mul regroups dimensions of attention so that they are cut: its h is ((o0_1_ + 8*o0_2_)//6)"


def test_rule_1_symbolic_sizes_are_not_guessed_equal() -> None:
    def broadcast(x, w, y):
        return dsi.linear(x, w) + y

    body = body_of(broadcast, (R(5, 7, 4), R(3, 4), R(5, 7, 3)), dynamic=(5, 7))
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    # As Dynamo gives it where nothing has compared the sizes yet: the residual's batch is a symbol of its own.
    other = body_of(lambda y: y + 1, (R(11, 7, 3),), dynamic=(11,)).graph
    placeholders[2].meta["val"] = next(iter(other.nodes)).meta["val"]
    with pytest.raises(Refused, match=r"region rule 1: .* broadcasts a dimension of size .*, which may or may not be equal"):
        plan_region(body)


# --------------------------------------------------------------------------------------------------------- 2: one anchor group


def test_rule_2_linears_of_two_inputs_are_two_anchors() -> None:
    text = refusal(lambda x, y, v, w: dsi.linear(x, v) + dsi.linear(y, w), R(3, 4), R(3, 4), R(6, 4), R(6, 4))
    assert text == "region rule 2: linear_1 reads arg1_1, another input than linear reads (arg0_1)"


def test_rule_2_linears_of_two_inner_sizes() -> None:
    text = refusal(lambda x, y, v, w: dsi.linear(x, v) + dsi.linear(y, w), R(3, 4), R(3, 5), R(6, 4), R(6, 5))
    assert text.startswith("region rule 2: linear_1 and linear differ in dtype, rows or inner size")


def test_rule_2_a_weight_computed_in_the_region() -> None:
    text = refusal(lambda x, w, s: dsi.linear(x, w * s), R(3, 4), R(6, 4), R(6, 1))
    assert text == "region rule 2: the weight mul of linear is no input of the region, nor a slice of one"


def test_rule_2_a_weight_of_another_dtype() -> None:
    body = body_of(lambda x, w: dsi.linear(x, w), (R(3, 4), R(6, 4)))
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    placeholders[1].meta["val"] = placeholders[1].meta["val"].to(torch.bfloat16)
    with pytest.raises(Refused, match="region rule 2: linear multiplies float32 by a weight of bfloat16"):
        plan_region(body)


def test_rule_2_equal_inputs_through_different_views_are_one_anchor() -> None:
    def flat_and_not(x, v, w):
        return dsi.linear(x, v).sin(), dsi.linear(x.view(6, 4), w)

    plan = check(flat_and_not, (R(2, 3, 4), R(5, 4), R(7, 4)))
    assert [int(s.size) for s in plan.segments] == [5, 7]


# ------------------------------------------------------------------------------------------------------------ 3: rows x columns


def test_rule_3_a_slice_of_rows() -> None:
    text = refusal(lambda x, w: dsi.linear(x, w)[:, -1:] * 2, R(2, 3, 4), R(6, 4))
    assert text.startswith("region rule 3: mul reads row ") and text.endswith("which is not every one of its 6 rows once")


def test_rule_3_rows_mixed() -> None:
    assert "mixes rows" in refusal(lambda x, w: dsi.linear(x, w) + dsi.linear(x, w).flip(0), R(3, 4), R(6, 4))


def test_rule_3_columns_repeated() -> None:
    def repeated(x, w):
        return dsi.linear(x, w).view(3, 2, 1, 3).expand(3, 2, 4, 3).reshape(3, 24)

    assert refusal(repeated, R(3, 4), R(6, 4)).startswith("region rule 3: ")


def test_rule_3_row_regions_have_one_shape() -> None:
    text = refusal(lambda x, y: (x + 1, y + 1), R(3, 4), R(5, 4))
    assert text == "region rule 3: add_1 [5, 4] has not the 3 rows of 4 columns of the region's other values"


# ----------------------------------------------------------------------------------------------------------------- 4: epilogue


def test_rule_4_columns_of_another_group() -> None:
    def across(x, w):  # each column beside one of another head
        y = dsi.linear(x, w)
        return y + y.view(3, 2, 3).transpose(1, 2).reshape(3, 6)

    text = refusal(across, R(3, 4), R(6, 4))
    assert text == "region rule 4: add, by a permutation, works on all 6 columns of the anchor, which no program owns"


def test_rule_4_columns_that_are_not_in_a_group() -> None:
    def repeated(x, w):  # two heads beside the first of them
        y = dsi.linear(x, w).view(3, 2, 3)
        return y * y[:, :1]

    assert refusal(repeated, R(3, 4), R(6, 4)).startswith("region rule 4: ")


def test_rule_4_no_scan() -> None:
    text = refusal(lambda x, w: dsi.linear(x, w).cumsum(-1), R(3, 4), R(6, 4))
    assert text == "region rule 4: aten.cumsum.default is neither a view nor pointwise, so no point of cumsum can be computed by itself"


def test_rule_4_a_norm_of_an_input_is_no_epilogue() -> None:
    text = refusal(lambda x, w, y, g: dsi.linear(x, w) + dsi.rms_norm(y, g, eps=1e-5), R(3, 4), R(6, 4), R(3, 6), R(6))
    assert text == "region rule 4: the epilogue reads rms_norm, a reduction of region inputs"


@pytest.mark.parametrize("name", ["sort", "argmax", "softmax", "sum", "mean"])
def test_rule_4_reductions_that_are_no_norm(name: str) -> None:
    def reduces(x):
        value = getattr(x, name)(-1)
        return (value[0] if isinstance(value, tuple) else value) * 2

    assert "region" in refusal(reduces, R(3, 4))


# ----------------------------------------------------------------------------------------------------------------- 5: prologue


def test_rule_5_a_norm_over_part_of_the_inner_size() -> None:
    def per_head(x, g, w):
        return dsi.linear(dsi.rms_norm(x.view(3, 2, 4), g, eps=1e-5).view(3, 8), w)

    text = refusal(per_head, R(3, 8), R(4), R(6, 8))
    assert text == "region rule 5: rms_norm reduces 4 elements, and its linear contracts 8"


def test_rule_5_a_norm_along_the_rows() -> None:
    def other_way(x, g, w):
        return dsi.linear(dsi.rms_norm(x.t(), g, eps=1e-5).t(), w)

    assert (
        refusal(other_way, R(4, 4), R(4), R(6, 4)) == "region rule 5: rms_norm is taken along another dimension than its linear contracts"
    )


def test_rule_5_attention_reduces_no_operand() -> None:
    def normed(q, k, v, g):
        return dsi.attention(dsi.rms_norm(q, g, eps=1e-5), k, v, None, None, scale=1.0)

    text = refusal(normed, R(1, 2, 3, 4), R(1, 2, 5, 4), R(1, 2, 5, 4), R(4))
    assert text == "region rule 5: rms_norm is a reduction, which attention recomputes for no operand"


def test_rule_5_a_mask_is_no_index() -> None:
    body = body_of(lambda x, i: x[i] * 2, (R(3, 4), torch.tensor([1, 0, 1])))
    index = [n for n in body.graph.nodes if n.op == "placeholder"][1]
    index.meta["val"] = index.meta["val"].bool()
    with pytest.raises(Refused, match="region rule 5: index indexes by a mask, whose result has no fixed size"):
        plan_region(body)


# --------------------------------------------------------------------------------------------- 6: reductions over all columns


def test_rule_6_a_norm_over_all_columns() -> None:
    def post_norm(x, w, r, g, b):
        return dsi.layer_norm(dsi.linear(x, w) + r, g, b, eps=1e-5)

    text = refusal(post_norm, R(3, 4), R(6, 4), R(3, 6), R(6), R(6))
    assert text == "region rule 6: layer_norm reduces all 6 columns of the anchor"


def test_rule_6_a_norm_over_columns_that_are_no_aligned_group() -> None:
    def interleaved(x, w, g):
        y = dsi.linear(x, w).view(3, 4, 2).transpose(1, 2)
        return dsi.rms_norm(y, g, eps=1e-5) + y

    assert refusal(interleaved, R(3, 4), R(8, 4), R(4)).startswith("region rule 6: rms_norm reduces 4 columns that are no aligned group")


def test_rule_6_attention_result() -> None:
    def normed(q, k, v, g):
        return dsi.rms_norm(dsi.attention(q, k, v, None, None, scale=1.0), g, eps=1e-5)

    text = refusal(normed, R(1, 2, 3, 4), R(1, 2, 5, 4), R(1, 2, 5, 4), R(4))
    assert text == "region rule 6: rms_norm reduces the result of attention"


# ----------------------------------------------------------------------------------------------------- 7: one contraction


def test_rule_7_a_linear_of_a_linear() -> None:
    text = refusal(lambda x, v, w: dsi.linear(dsi.linear(x, v).relu(), w), R(3, 4), R(6, 4), R(5, 6))
    assert text.startswith("region rule ") and "linear" in text
    assert text.split(":")[0] in ("region rule 2", "region rule 7")


def test_rule_7_a_linear_of_a_linear_of_one_size() -> None:
    text = refusal(lambda x, v, w: dsi.linear(dsi.linear(x, v).relu(), w), R(3, 4), R(4, 4), R(4, 4))
    assert text == "region rule 7: linear_1 contracts a value computed from linear, another linear of the region"


def test_rule_7_attention_beside_a_linear() -> None:
    def both(q, k, v, w):
        return dsi.linear(dsi.attention(q, k, v, None, None, scale=1.0), w)

    text = refusal(both, R(1, 2, 3, 4), R(1, 2, 5, 4), R(1, 2, 5, 4), R(6, 4))
    assert text == "region rule 7: attention is a second contraction beside the region's linears"


def test_rule_7_two_attentions() -> None:
    def twice(q, k, v):
        return dsi.attention(dsi.attention(q, k, v, None, None, scale=1.0), k, v, None, None, scale=1.0)

    text = refusal(twice, R(1, 2, 3, 4), R(1, 2, 5, 4), R(1, 2, 5, 4))
    assert text == "region rule 7: attention_1 is a second contraction beside attention"


# ------------------------------------------------------------------------------------------------------------ 8: what escapes


def test_rule_8_a_value_of_another_shape_beside_an_anchor() -> None:
    text = refusal(lambda x, w, n: (dsi.linear(x, w), n + 1), R(3, 4), R(6, 4), torch.tensor(3))
    assert text == "region rule 8: add [] depends on no anchor and is not one value a row and inner index (3 x 4)"


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.view(2, 6), lambda x: x[1:], lambda x: x.chunk(2)[1]])
def test_rule_8_an_input_or_a_view_of_one(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    text = refusal(lambda x, y: (x + y, view(x)), R(4, 3), R(4, 3))
    assert text.startswith("region rule 8: ") and text.endswith("so it belongs outside of the region")


def test_rule_8_a_view_of_another_output() -> None:
    def twice(x, w):
        y = dsi.linear(x, w)
        return y, y.view(3, 2, 3)

    assert (
        refusal(twice, R(3, 4), R(6, 4)) == "region rule 8: view is a view of another output, linear, so it belongs outside of the region"
    )


def test_rule_8_memory_shared_by_several_elements() -> None:
    assert "repeats the same memory" in refusal(lambda x: (x + 1).expand(2, 3), R(1, 3))


# -------------------------------------------------------------------------------------------------- 9: the cache is written only


def test_rule_9_a_written_cache_is_not_read() -> None:
    def reads(x, w, cache, pos):
        new = dsi.linear(x, w).view(1, 3, 2, 3).transpose(1, 2)
        return dsi.kv_write(cache, pos, new, dim=2) * 2

    text = refusal(reads, R(3, 4), R(6, 4), R(1, 2, 9, 3), torch.arange(3))
    assert text == "region rule 9: the cache that kv_write writes is read in the same region"


def test_rule_9_a_written_cache_is_not_attended_to() -> None:
    def reads(q, k, v, cache, pos):
        return dsi.attention(q, dsi.kv_write(cache, pos, k, dim=2), v, None, None, scale=1.0)

    text = refusal(reads, R(1, 2, 3, 4), R(1, 2, 3, 4), R(1, 2, 9, 4), R(1, 2, 9, 4), torch.arange(3))
    assert text == "region rule 9: the cache that kv_write writes is read in the same region"


def test_rule_9_the_cache_is_an_input() -> None:
    def computed(x, w, cache, pos):
        return dsi.kv_write(cache * 2, pos, dsi.linear(x, w), dim=0)

    text = refusal(computed, R(3, 4), R(6, 4), R(9, 6), torch.arange(3))
    assert text == "region rule 9: kv_write writes into mul, which is no input of the region"


def test_rule_9_the_old_cache_is_not_read_either() -> None:
    def rolls(x, w, cache, pos):
        return dsi.kv_write(cache, pos, dsi.linear(x, w) + cache[:3], dim=0)

    text = refusal(rolls, R(3, 4), R(6, 4), R(9, 6), torch.arange(3))
    assert text == "region rule 9: the cache arg2_1 is both written and read in the region"


def test_rule_9_one_write_a_cache() -> None:
    def twice(x, w, cache, pos):
        y = dsi.linear(x, w)
        return dsi.kv_write(cache, pos, y, dim=0), dsi.kv_write(cache, pos, y * 2, dim=0)

    assert refusal(twice, R(3, 4), R(6, 4), R(9, 6), torch.arange(3)) == "region rule 9: two outputs of the region write into one cache"


# ------------------------------------------------------------------------------------------------------------- 10: all-reduce


def test_rule_10_regions_never_cross_an_all_reduce() -> None:
    body = body_of(lambda x, w, r: dsi.linear(x, w) + r, (R(3, 4), R(6, 4), R(3, 6)))
    linear = next(n for n in body.graph.nodes if n.target is dsi.linear.default)
    with body.graph.inserting_after(linear):
        reduced = body.graph.call_function(dsi.all_reduce.default, (linear, "group"))
    reduced.meta["val"] = linear.meta["val"]
    linear.replace_all_uses_with(reduced, delete_user_cb=lambda user: user is not reduced)
    with pytest.raises(Refused, match=r"region rule 10: .* is an all-reduce, which regions never cross"):
        plan_region(body)


# ----------------------------------------------------------------------------------------------------------------- the rest


def test_float64_is_not_computed_in() -> None:
    assert "dtype float64" in refusal(lambda x: x + 1, R(3, 4, dtype=torch.float64))


def test_a_linear_in_float64() -> None:
    assert "float64" in refusal(lambda x, w: dsi.linear(x, w), R(3, 4, dtype=torch.float64), R(6, 4, dtype=torch.float64))


def test_the_kind_must_fit() -> None:
    assert "operators of kind linear, not attention" in refusal(lambda x, w: dsi.linear(x, w), R(3, 4), R(6, 4), kind="attention")


def test_a_size_that_no_input_gives() -> None:
    def longer(x, y):
        return torch.cat([x, y], 0) + 1

    body = body_of(longer, (R(5, 3), R(7, 3)), dynamic=(5, 7))
    x, y = (n for n in body.graph.nodes if n.op == "placeholder")
    both = next(n for n in body.graph.nodes if n.target is torch.ops.aten.cat.default)
    x.meta["val"] = both.meta["val"]  # its dimension is a sum: neither size is anywhere by itself
    both.replace_all_uses_with(x)
    body.graph.erase_node(both)
    body.graph.erase_node(y)
    with pytest.raises(Refused, match="can be read off no input of the region: it must be passed as a SymInt"):
        plan_region(body)


def test_a_refusal_names_the_models_source_line() -> None:
    body = body_of(lambda x: x.cumsum(-1), (R(3, 4),))
    node = next(n for n in body.graph.nodes if n.op == "call_function")
    node.meta["stack_trace"] = '  File "/somewhere/model.py", line 12, in forward\n    return x.cumsum(-1)'
    with pytest.raises(Refused) as caught:
        plan_region(body)
    assert caught.value.refusal.where == "model.py:12"


# ------------------------------------------------------------------------------------------------------------ what went unforeseen


def test_what_the_planner_did_not_think_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def mistaken(body: torch.fx.GraphModule) -> None:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr("dsi.ir.analysis.plan_row", mistaken)
    assert refusal(lambda x: x + 1, R(3)) == "region: it is not planned: IndexError: tuple index out of range"
