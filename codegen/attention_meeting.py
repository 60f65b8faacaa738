"""How programs that share the keys of a block of rows meet: who has a part to give, and how the last to arrive joins the parts.

Partial results (sums of weighted values, maxima of scores, sums of weights; fp32) go to a workspace. A program that has stored its own
adds itself to what has arrived; the one that completes it joins the parts in their order, whoever was last, so that a result has the same
bits in every run. What has arrived is 0 again afterwards.

All programs can meet, without looking at anything. Or they look at the whole mask first: all of them see the same mask, so they agree on
which parts hold keys that some row sees. A program without any leaves; one that is alone writes the result, and nothing is stored,
counted or read back. Where no part has any, the first writes what rows get that see nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
from dsi.ir import tile as t

from .attention_scan import Seen
from .attention_tiles import AttentionTiles
from .builder import Block
from .columns import ceil_div

UNROLLED = 8  # parts whose loads are under way at once when they are joined


@dataclass(frozen=True)
class Parts:
    """Sources: the program's own part, what each that meets adds to what has arrived, what has then arrived in all, and an end of the
    numbers of parts. Where not all parts need be there: `there` gives from the source of a part's number whether it is ("": known to be),
    `among` is whether the program's own is, "" where those without have left."""

    part: str
    own: str
    whole: str
    end: str
    there: Callable[[str], str] | None = None
    among: str = ""

    @property
    def last(self) -> str:
        """Source of what has arrived before the last, if that is a number."""
        return str(int(self.whole) - 1) if self.whole.isdigit() else ""


def all_parts(part: str, split: int) -> Parts:
    """Every program meets."""
    return Parts(part, "1", str(split), str(split))


def parts_in_sight(kernel: AttentionTiles, part: str, sight: str) -> Parts:
    """Those with a bit in the integer `sight` meet. The others leave when they would: a branch here has what reads keys and values wait
    for it."""
    body, new = kernel.builder.body, kernel.builder.names.new
    own, live = new("own"), new("live")
    body.comment("a bit for each part that holds such a key; without any the first part's")
    body.line(f"{live} = {sight}")
    body.line(f"{live} = tl.where({live} == 0, 1, {live})")
    body.line(f"{own} = 1 << {part}")

    def there(other: str) -> str:
        return f"({live} & {1 << int(other) if other.isdigit() else f'(1 << {other})'}) != 0"

    return Parts(part, own, live, str(kernel.choice.split), there, f"({live} & {own}) != 0")


def parts_dealt(kernel: AttentionTiles, part: str, start: str, seen: Seen) -> Parts:
    """As many as there are blocks of keys from `start` to the end of those seen meet: a program without a block ends here."""
    body, live = kernel.builder.body, kernel.builder.names.new("live")
    body.comment("as many parts as there are blocks between them; without any the first writes")
    body.line(f"{live} = tl.maximum(tl.minimum(tl.cdiv({seen.end} - {start}, BLOCK_J), SPLIT), 1)")
    body.line(f"if {part} >= {live}:")
    body.line("    return")
    # A loop over few parts is unrolled whole, whatever its end.
    few = kernel.choice.split <= UNROLLED
    there = (lambda other: "" if other == "0" else f"{other} < {live}") if few else None
    return Parts(part, "1", live, str(kernel.choice.split) if few else live, there)


def meet(kernel: AttentionTiles, parts: Parts) -> None:
    """Has the last of the programs that share a block of rows write its result, from the sums that each has made."""
    body = kernel.builder.body
    if parts.whole.isdigit():
        body.comment(f"the last of {parts.whole} programs to arrive joins their parts, in order")
        _join(kernel, body, parts)
        return
    alone, others = Block(body), Block(body)
    kernel.finish(alone, list(kernel.outs))
    _join(kernel, others, parts)
    body.comment("one that is alone needs no other; else the last to arrive joins the parts, in order")
    body.attach(f"if {parts.whole} == {parts.own}:", alone)
    body.attach(f"elif {parts.among}:" if parts.among else "else:", others)


def _join(kernel: AttentionTiles, block: Block, parts: Parts) -> None:
    builder, new, split = kernel.builder, kernel.builder.names.new, kernel.choice.split
    rows = 1 if kernel.single else kernel.choice.block_m
    record = rows * (sum(part.width for part in kernel.e) + 2 * _along(kernel))
    blocks = sympy.Integer(1) if kernel.one_block else ceil_div(kernel.rows, kernel.choice.block_m)
    count = sympy.sympify(kernel.plan.batch) * kernel.plan.kv_heads * blocks
    partial = builder.workspace("partial", count * split * record, "float32")
    arrivals = builder.workspace("arrived", count, "int32", zeroed=True)
    if number := _number(kernel, blocks):
        wide = not (count.is_Integer and int(count) * split * record < 2**31)
        first = f"tl.cast({number}, tl.int64)" if wide else f"({number})" if " " in number else number
        partial += f" + {first} * {split * record}"
        arrivals += f" + {number}"
    places = _places(kernel, block, partial, rows)
    for name, (place, mask) in places.items():
        block.line(f"tl.store({place} + {parts.part} * {record}, {name}{f', mask={mask}' if mask else ''})")
    block.line("tl.debug_barrier()")
    arrived = new("arrived_before")
    block.line(f'{arrived} = tl.atomic_add({arrivals}, {parts.own}, sem="acq_rel")')
    done = Block(block)
    done.line(f"tl.store({arrivals}, 0)")
    whole = {name: new(f"all_{name}") for name in places}
    given = _given(done, parts, "0", new("given"))
    for name in places:
        done.line(f"{whole[name]} = {_load(name, places[name], given, parts)}")
    loop, other, top, share = Block(done), new("other"), new("new_top"), new("share")
    there = {name: new(f"{name}_there") for name in places}
    given = _given(loop, parts, other, new("given"))
    for name in places:
        loop.line(f"{there[name]} = {_load(name, places[name], given, parts, f' + {other} * {record}')}")
    loop.line(f"{top} = tl.maximum({whole['top']}, {there['top']})")
    loop.line(f"shift = {kernel.shift(top)}")
    loop.line(f"decay = {kernel.weight(whole['top'], 'shift')}")
    loop.line(f"{share} = {kernel.weight(there['top'], 'shift')}")
    for name in ("total", *kernel.outs):
        along = "" if name == "total" or kernel.single else "[:, None]"
        loop.line(f"{whole[name]} = {whole[name]} * decay{along} + {there[name]} * {share}{along}")
    loop.line(f"{whole['top']} = {top}")
    unrolled = f"tl.static_range(1, {parts.end})" if split <= UNROLLED else f"tl.range(1, {parts.end}, loop_unroll_factor={UNROLLED})"
    done.attach(f"for {other} in {unrolled}:", loop)
    kernel.finish(done, [whole[name] for name in kernel.outs], whole["total"], whole["top"])
    block.attach(f"if {arrived} == {parts.last}:" if parts.last else f"if {arrived} + {parts.own} == {parts.whole}:", done)


def _given(block: Block, parts: Parts, number: str, name: str) -> str:
    """Writes whether a part is there; returns the name, "" where it is known to be."""
    code = parts.there(number) if parts.there is not None else ""
    if code:
        block.line(f"{name} = {code}")
    return name if code else ""


def _load(name: str, found: tuple[str, str], given: str, parts: Parts, further: str = "") -> str:
    """Source of what a part has left; of nothing, where it is not there."""
    place, mask = found
    conditions = " & ".join(condition for condition in (mask, given) if condition)
    nothing = 'float("-inf")' if name == "top" and parts.there is not None else "0.0"
    return f'tl.load({place}{further}{f", mask={conditions}, other={nothing}" if conditions else ""}, cache_modifier=".cg")'


def _along(kernel: AttentionTiles) -> int:
    """How many times a part has its maximum and its sum of weights: once a channel, where they lie along channels."""
    return kernel.e[0].width if kernel.by_warp else 1


def _number(kernel: AttentionTiles, blocks: sympy.Expr) -> str:
    """Source of the number of a block of rows among all; "" where there is one."""
    code = ""
    for name, size, fixed in (
        ("b", "", t.B in kernel.fixed),
        ("g", str(kernel.plan.kv_heads), t.G in kernel.fixed),
        ("row_block", kernel.size(blocks, 3), kernel.one_block),
    ):
        if not fixed:
            code = f"{f'({code})' if ' ' in code else code} * {size} + {name}" if code else name
    return code


def _places(kernel: AttentionTiles, block: Block, partial: str, rows: int) -> dict[str, tuple[str, str]]:
    """Writes the addresses of a part's results in the workspace; returns, by what is stored, the address and the mask."""
    new, lane = kernel.builder.names.new, "tl.arange(0, BLOCK_M)"
    found, at = {}, 0
    here = new("here")
    block.line(f"{here} = {partial}")
    for part, out in zip(kernel.e, kernel.outs, strict=True):
        place = new(f"{out}_here")
        lanes = f"tl.arange(0, {part.block})"
        lanes = lanes if kernel.single else f"{lane}[:, None] * {part.block} + {lanes}[None, :]"
        block.line(f"{place} = {here} + {f'{at} + ' if at else ''}{lanes}")
        found[out] = (place, "m_in[:, None]" if kernel.row_mask else "")
        at += rows * part.width
    for name in ("top", "total"):
        place = new(f"{name}_here")
        lanes = f" + tl.arange(0, {kernel.e[0].block})" if _along(kernel) > 1 else "" if kernel.single else f" + {lane}"
        block.line(f"{place} = {here} + {at}{lanes}")
        found[name] = (place, "m_in" if kernel.row_mask else "")
        at += rows * _along(kernel)
    return found
