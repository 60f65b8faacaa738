"""The parts of the page apart: repeated stretches, the layout, all-reduces and leftovers in a picture, figures."""

import re
from itertools import pairwise

import pytest
import torch
from dsi.codegen.devices import H200
from dsi.compiler.explain import Explanation
from dsi.compiler.figures import figures_of, microseconds, percent, quantity, variants
from dsi.compiler.page.fold import Repeat, follows, places, repeats, settled
from dsi.compiler.page.layout import lay_out
from dsi.compiler.page.model import Item, Picture
from dsi.compiler.page.svg import draw
from dsi.compiler.record import GraphRecord, Node
from dsi.ir.context import Report
from dsi.ir.errors import Refusal
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dsi

# ------------------------------------------------------------------------------------------------------------------------- folding


def test_layers_between_other_things():
    assert repeats("xyabcabcabcz") == [Repeat(2, 3, 3)]
    assert repeats("abababXcdecde") == [Repeat(0, 2, 3), Repeat(7, 3, 2)]
    assert repeats("abcdef") == [] and repeats("") == [] and repeats("aab") == []
    assert repeats("xaaay") == [Repeat(1, 1, 3)]


def test_a_half_layer_at_the_end_stays_outside():
    assert repeats("abcabcab") == [Repeat(0, 3, 2)]


def test_layers_of_one_kind_within_layers_of_two_kinds():
    """Five layers with a window and one without, twice."""
    (found,) = repeats("ababababababc" * 2)
    inner = Repeat(0, 2, 6)
    assert found == Repeat(0, 13, 2, (inner,)) and found.shown() == [0, 1, 12]
    where = places([found])
    assert [where[i].first for i in (0, 3, 11, 12, 13, 16, 25)] == [0, 1, 1, 12, 0, 1, 12]
    assert follows(where[1], where[2]) and follows(where[12], where[13]) and not follows(where[0], where[1])
    assert follows(where[2], where[15])  # the same layer of another stretch


@given(st.lists(st.sampled_from("abc"), max_size=24))
def test_repeats_are_what_they_say(items):
    def check(found):
        for repeat in found:
            stretch = items[repeat.start : repeat.start + repeat.period]
            assert repeat.count > 1 and items[repeat.start : repeat.end] == stretch * repeat.count
            assert all(repeat.start <= inner.start and inner.end <= repeat.start + repeat.period for inner in repeat.inner)
            check(repeat.inner)
        assert all(a.end <= b.start for a, b in pairwise(found))

    found = repeats(items)
    check(found)
    for i, place in places(found).items():
        assert items[i] == items[place.first] and place.first in place.stretches[0][0].shown()


def test_what_occurs_once_comes_as_soon_as_it_can():
    """`m`, which the first of two layers makes for both, stands in front of them; `n` waits for the first layer, and `z` for all."""
    reads = {"a1": ["x"], "m": ["x"], "b1": ["a1", "m"], "a2": ["b1"], "n": ["b1"], "b2": ["a2", "m", "n"], "z": ["b2"]}
    kinds = {name: name[0] for name in reads}
    assert settled(reads, kinds, {name: number for number, name in enumerate(reads)}) == ["m", "a1", "b1", "n", "a2", "b2", "z"]


@given(st.integers(0, 12).flatmap(lambda n: st.tuples(*(st.lists(st.integers(0, max(i - 1, 0)), max_size=3) for i in range(n)))), st.data())
def test_settled_order_can_run(sources, data):
    reads = {f"n{i}": [f"n{s}" for s in given if s < i] for i, given in enumerate(sources)}
    order = settled(reads, {name: data.draw(st.sampled_from("abc")) for name in reads}, {name: data.draw(st.integers()) for name in reads})
    assert sorted(order) == sorted(reads)
    assert all(order.index(source) < order.index(name) for name, given in reads.items() for source in given)


# -------------------------------------------------------------------------------------------------------------------------- layout


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 14))
    names = [f"n{i}" for i in range(count)]
    sizes = {name: (draw(st.floats(20, 200)), draw(st.floats(10, 60))) for name in names}
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    edges = draw(st.lists(st.sampled_from(pairs), max_size=25)) if pairs else []
    start = draw(st.integers(0, count - 1))
    return sizes, edges, [names[start : start + draw(st.integers(1, 5))]]


@given(graphs())
@settings(deadline=None)
def test_nothing_overlaps_and_everything_flows_down(graph):
    sizes, edges, groups = graph
    layout = lay_out(sizes, edges, groups)
    boxes = list(layout.boxes.values())
    assert len(boxes) == len(sizes)
    for i, a in enumerate(boxes):
        assert a.x - a.width / 2 >= 0 and a.x + a.width / 2 <= layout.width and a.y + a.height / 2 <= layout.height
        for b in boxes[:i]:
            apart_x = abs(a.x - b.x) >= (a.width + b.width) / 2 - 1e-6
            apart_y = abs(a.y - b.y) >= (a.height + b.height) / 2 - 1e-6
            assert apart_x or apart_y
    for a, b in set(edges):
        points = layout.edges[a, b]
        assert points[0][1] == pytest.approx(layout.boxes[a].y + sizes[a][1] / 2)
        assert points[-1][1] == pytest.approx(layout.boxes[b].y - sizes[b][1] / 2)
        assert all(p[1] <= q[1] + 1e-6 for p, q in pairwise(points))


def test_a_frame_holds_nothing_else():
    """`x` and `y` would share a layer with the group, were it not for the frame."""
    sizes = dict.fromkeys(["in", "a", "b", "x", "y", "out"], (50.0, 20.0))
    edges = [("in", "a"), ("a", "b"), ("in", "x"), ("x", "b"), ("b", "out"), ("a", "y"), ("y", "out")]
    boxes = lay_out(sizes, edges, [["a", "b"]]).boxes
    assert boxes["x"].y < boxes["a"].y and boxes["y"].y > boxes["b"].y


def test_what_is_unrelated_to_a_group_can_be_kept_out_of_its_layers():
    sizes = dict.fromkeys("abcuvwz", (50.0, 20.0))
    edges = [("a", "b"), ("b", "c"), ("c", "z"), ("u", "v"), ("v", "w"), ("w", "z")]
    boxes = lay_out(sizes, edges, ["abc"], alone=True).boxes
    assert max(boxes[n].y for n in "uvw") < boxes["a"].y and boxes["z"].y > boxes["c"].y
    nested = lay_out(sizes, edges, ["abc", "ab"], alone=True).boxes
    assert max(nested[n].y for n in "uvw") < nested["a"].y < nested["b"].y < nested["c"].y < nested["z"].y


def picture_of(edges, names, *frames):
    items = {
        name: Item(name, "linear", (name,), tuple(a for a, b in edges if b == name), name, node(name, "dsi.linear.default"))
        for name in names
    }
    return draw(Picture(items, [(tuple(frame), 5 - i) for i, frame in enumerate(frames)]), "g0-", "a picture")


def test_layers_that_run_in_between_each_other_have_no_frame():
    """`m` must come before `b` and after `a`, whatever is drawn: each of the two says by itself how often it occurs."""
    text = picture_of([("a", "m"), ("m", "b"), ("a", "b")], "amb", "ab")
    assert text.count("× 5") == 2 and '<g class="frame"><rect' not in text
    assert picture_of([("a", "b"), ("b", "m")], "abm", "ab").count('<g class="frame"><rect') == 1


def test_a_frame_within_a_frame():
    text = picture_of([("a", "b"), ("b", "c"), ("c", "d")], "abcd", "abc", "ab")
    outer, inner = (
        [float(n) for n in re.findall(r"-?[\d.]+", found)][:4] for found in re.findall(r'<g class="frame"><rect ([^>]*)>', text)
    )
    assert text.index("× 5") < text.index("× 4")
    assert (
        float(re.search(r'viewBox="(\S+)', text).group(1)) < outer[0] < inner[0]
        and outer[1] < inner[1]
        and all(outer[i] + outer[i + 2] > inner[i] + inner[i + 2] for i in (0, 1))
    )


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match="circle"):
        lay_out({"a": (1, 1), "b": (1, 1)}, [("a", "b"), ("b", "a")])


# --------------------------------------------------------------------------------------------------- all-reduces and what was left


def node(name, target, *inputs, value="float32[2, 4]", op="call_function"):
    return Node(name, op, target, inputs, value, "/model/block.py", 7, f"{name} = ...")


def test_all_reduces_and_leftovers_are_drawn():
    nodes = [
        node("x", "x", op="placeholder"),
        node("w", "w", op="placeholder"),
        node("first", "aten.sort.stable", "x", "w"),
        node("view", "aten.view.default", "first"),
        node("sum", "dsi.all_reduce.default", "view"),
        node("last", "aten.topk.default", "sum"),
        node("output", "output", "last", op="output"),
    ]
    nodes[3] = Node(**{**vars(nodes[3]), "is_view": True})
    report = Report(unfused=[Refusal("aten.sort.stable stays: nobody knows how <it> fuses", "first", "block.py:7", "fuse")])
    text = Explanation([report], [GraphRecord({}, nodes, nodes, frozenset({"x"}))]).html()
    before, after = re.findall(r"<svg.*?</svg>", text, re.DOTALL)[::-1]
    for picture in (before, after):
        assert picture.count('class="boundary"') == 1
        assert len(re.findall(r'class="node left"', picture)) == 2
        assert len(re.findall(r'class="node input"', picture)) == 1  # a parameter is no input that is drawn
        assert 'data-from="first" data-to="sum"' in picture  # through the view
    assert "nobody knows how &lt;it&gt; fuses" in text and "no region crosses it" in text


# ------------------------------------------------------------------------------------------------------------------------- figures


@pytest.mark.parametrize(("dtype", "limit"), [(torch.bfloat16, "memory"), (torch.float32, "compute")])
def test_figures_of_a_linear(dtype, limit):
    (region,) = dsi.explain(nn.Linear(256, 512, bias=False).to(dtype).eval(), torch.randn(64, 256).to(dtype)).regions
    found = figures_of(region, H200)
    assert found.flops == 2 * 64 * 256 * 512
    assert found.bytes == dtype.itemsize * (64 * 256 + 256 * 512 + 64 * 512)
    assert found.floor == max(found.bytes / H200.bandwidth, found.flops / H200.matrix[dtype.itemsize]) and found.limit == limit
    assert 0 < found.share <= 1 and found.seconds > found.floor
    assert len(variants(region, H200)) == 1


def test_figures_of_a_symbolic_size_say_what_they_assume():
    def model(x, w):
        return torch.nn.functional.linear(x, w)

    x = torch.randn(9, 32)
    torch._dynamo.mark_dynamic(x, 0)
    (region,) = dsi.explain(model, x, torch.randn(16, 32)).regions
    found = variants(region, H200)
    assert len(found) > 2 and all("=" in f.assumed for f in found)


def test_quantities():
    assert quantity(1.18e9, "B") == "1.18 GB" and quantity(512, "B") == "512 B" and quantity(4.6e6, "FLOP") == "4.6 MFLOP"
    assert microseconds(3.14e-6) == "3.14 µs" and microseconds(2.5e-3) == "2.5 ms"
    assert percent(0.641) == "64%" and percent(0.032) == "3.2%"
