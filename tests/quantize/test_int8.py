"""int8 in plain torch: errors, grids, groups as DeepSpeed counts them, and what is refused."""

import pytest
import torch
from dsi.ir.errors import DsiError
from dsi.ir.quantised_ops import dequantise
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from dsi.quantize.ops import quantize_weight
from hypothesis import given, settings
from hypothesis import strategies as st

ROW = Grouping()


def matrices(n: int, k: int, seed: int, spread: float, dtype: torch.dtype) -> torch.Tensor:
    """Entries over many magnitudes, with zeros and rows of zeros."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(n, k, generator=generator) * torch.exp(spread * torch.randn(n, k, generator=generator))
    values[torch.rand(n, k, generator=generator) < 0.1] = 0
    values[torch.rand(n, generator=generator) < 0.2] = 0
    return values.to(dtype)


groupings = st.sampled_from(
    [ROW, Grouping("inner", 32), Grouping("inner", 64), Grouping("flat", 1), Grouping("flat", 3), Grouping("flat", 6)]
)


@settings(max_examples=60, deadline=None)
@given(
    n=st.sampled_from([6, 12, 48]),
    k=st.sampled_from([48, 70, 96, 192]),
    seed=st.integers(0, 999),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    scale=st.sampled_from([1e-42, 1e-38, 1e-3, 1.0, 1e30]),
    grouping=groupings,
    kn=st.booleans(),
    half=st.booleans(),
)
def test_no_entry_is_off_by_more_than_half_its_scale(n, k, seed, spread, scale, grouping, kn, half):
    weight = (matrices(n, k, seed, spread, torch.float32) * scale).to(torch.bfloat16 if half else torch.float32)
    stored = weight.t().contiguous() if kn else weight
    try:
        found = quantise(stored, Format(grouping), kn=kn)
    except DsiError as error:
        assert "quantize_groups" in str(error)
        return
    assert found.weight.shape == (n, k) and found.weight.is_contiguous() and int(found.weight.min()) >= -127
    step = dequantise(torch.ones_like(found.weight), found.scales, group=found.group, dtype=torch.float64)
    assert ((weight.double() - found.dequantise(torch.float64)).abs() <= step / 2).all()
    assert (found.weight[step == 0] == 0).all() and (weight[step == 0] == 0).all()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 999),
    scale=st.floats(2.0**-100, 2.0**100, width=32),
    grouping=st.sampled_from([ROW, Grouping("inner", 32), Grouping("flat", 2), Grouping("flat", 24)]),
)
def test_values_on_a_grid_come_back_exactly(seed, scale, grouping):
    generator = torch.Generator().manual_seed(seed)
    digits = torch.randint(-127, 128, (12, 80 if grouping.kind != "flat" else 64), generator=generator).to(torch.int8)
    digits[:, ::16] = 127  # in every group
    scales = scale * (1 + torch.rand(12, 1, generator=generator)) if grouping.kind == "row" else torch.tensor(scale)
    values = digits * scales
    found = quantise(values, Format(grouping))
    assert torch.equal(found.weight, digits) and torch.equal(found.dequantise(), values)
    again = quantise(found.dequantise(), Format(grouping))
    assert torch.equal(again.weight, found.weight) and torch.equal(again.scales, found.scales)


def test_half_is_rounded_to_even_and_the_largest_entry_is_not_clipped():
    weight = torch.tensor([[127.0, 0.5, 1.5, -2.5, -127.0, 126.5]])
    assert quantise(weight).weight.tolist() == [[127, 0, 2, -2, -127, 126]]
    assert quantise(weight * 4).scales.tolist() == [4.0]


def test_quotients_next_to_a_half_are_rounded_as_the_real_ones():
    """In fp32 the quotient of many of these is a half, and halves go to even."""
    scales = 1 + torch.rand(200, 1)
    middle = (torch.arange(-126, 127) + 0.5) * scales
    weight = torch.cat([torch.nextafter(middle, 2 * middle), torch.nextafter(middle, 0 * middle), middle, 127 * scales], 1)
    found = quantise(weight)
    exact = torch.round(weight.double() / found.scales.double()[:, None])
    assert torch.equal(found.weight.double(), exact)
    assert (torch.round(weight / found.scales[:, None]) != exact).any(), "this shows nothing"


def test_a_group_of_zeros_is_exactly_zero():
    weight = torch.zeros(2, 64)
    weight[1, 40] = 3.0
    found = quantise(weight, Format(Grouping("inner", 32)))
    assert found.scales[0].tolist() == [0.0, 0.0] and found.scales[1, 0] == 0 and torch.equal(found.dequantise(), weight)


def test_groups_along_k_end_in_a_short_one():
    weight = torch.randn(5, 70)
    found = quantise(weight, Format(Grouping("inner", 32)))
    assert found.group == 32 and found.scales.shape == (5, 3)
    torch.testing.assert_close(found.scales[:, 2] * 127, weight[:, 64:].abs().amax(1))
    assert quantise(weight, Format(Grouping("inner", 128))).scales.shape == (5,), "one group is a row"


@pytest.mark.parametrize("groups", [1, 2, 4, 8, 16, 32])
@pytest.mark.parametrize("kn", [False, True], ids=["[N, K]", "[K, N]"])
def test_flat_groups_are_counted_over_the_weight_as_it_lies_in_memory(groups, kn):
    stored = torch.randn(256, 24) if kn else torch.randn(8, 64)
    found = quantise(stored, Format(Grouping("flat", groups)), kn=kn)
    flat = stored.reshape(groups, -1)
    expected = torch.round(flat / (flat.abs().amax(1, keepdim=True) / 127)).reshape(stored.shape)
    assert torch.equal(found.weight, (expected.t() if kn else expected).to(torch.int8))
    step = dequantise(torch.ones_like(found.weight), found.scales, group=found.group)
    wanted = (flat.abs().amax(1, keepdim=True) / 127).expand_as(flat).reshape(stored.shape)
    torch.testing.assert_close(step, wanted.t() if kn else wanted)


@pytest.mark.parametrize(
    "shape, kn, groups, reason",
    [((8, 96), False, 7, "does not divide the 768"), ((12, 80), False, 8, "120 entries"), ((80, 12), True, 160, "6 entries")],
)
def test_flat_groups_that_cut_rows_irregularly_are_refused(shape, kn, groups, reason):
    with pytest.raises(DsiError, match=rf"layer\.weight: quantize_groups = {groups} .*{reason}"):
        quantise(torch.randn(shape), Format(Grouping("flat", groups)), kn=kn, name="layer.weight")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_weight_that_is_not_finite_is_refused_by_its_name(bad, dtype):
    weight = torch.ones(3, 40, dtype=dtype)
    weight[2, 39] = bad
    for grouping in (ROW, Grouping("inner", 32), Grouping("flat", 1)):
        with pytest.raises(DsiError, match=r"lm_head\.weight holds nan or infinite"):
            quantise(weight, Format(grouping), name="lm_head.weight")


def test_what_is_no_matrix_of_floats_is_refused():
    for value in (torch.ones(3), torch.ones(2, 2, dtype=torch.int32), torch.ones(0, 4)):
        with pytest.raises(DsiError, match="a floating-point matrix is quantised"):
            quantise(value)


def test_scales_are_fp16_only_where_fp16_holds_them():
    ordinary = torch.randn(4, 64)
    found = quantise(ordinary, Format(scales=torch.float16))
    assert found.scales.dtype == torch.float16
    assert ((ordinary - found.dequantise()).abs() <= found.scales.float()[:, None] / 2).all()
    assert torch.equal(quantise(found.dequantise(), Format(scales=torch.float16)).scales, found.scales)
    for factor in (1e-4, 1e8):
        assert quantise(ordinary * factor, Format(scales=torch.float16)).scales.dtype == torch.float32
    zeros = ordinary.clone()
    zeros[0] = 0
    assert quantise(zeros, Format(scales=torch.float16)).scales.dtype == torch.float16


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grouping("inner", 48),
        lambda: Grouping("flat", 0),
        lambda: Grouping("flat", True),
        lambda: Grouping("row", 4),
        lambda: Grouping("column"),
        lambda: Format(scales=torch.bfloat16),
    ],
)  # type: ignore[arg-type]
def test_formats_that_do_not_exist_are_refused(make):
    with pytest.raises(DsiError):
        make()


def test_large_weights_are_rounded_piece_by_piece(monkeypatch):
    weight = torch.randn(7, 100)
    whole = {g: quantise(weight, Format(g)) for g in (ROW, Grouping("inner", 32), Grouping("flat", 1))}
    monkeypatch.setattr("dsi.quantize.int8._AT_A_TIME", 33)
    for grouping, expected in whole.items():
        found = quantise(weight, Format(grouping))
        assert torch.equal(found.weight, expected.weight) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("grouping", [ROW, Grouping("inner", 32), Grouping("flat", 2), Grouping("flat", 16)])
@pytest.mark.parametrize("kn", [False, True])
def test_the_operator_says_beforehand_what_it_makes(grouping, kn):
    weight = torch.randn(64, 80) if not kn else torch.randn(128, 16)
    torch.library.opcheck(
        quantize_weight, (weight,), dict(kn=kn, grouping=grouping.kind, size=grouping.size), test_utils=("test_schema", "test_faketensor")
    )
    found = quantize_weight(weight, kn=kn, grouping=grouping.kind, size=grouping.size)
    expected = quantise(weight, Format(grouping), kn=kn)
    assert torch.equal(found[0], expected.weight) and torch.equal(found[1], expected.scales)
