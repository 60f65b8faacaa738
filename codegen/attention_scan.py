"""Which keys a block of rows sees, found from the mask alone before any key is read.

A mask is one expression like any other: what a model hides (padding, keys not yet written, all but a window) is not known when a kernel is
made. It is small beside keys and values, so a program looks through it first, in wide steps whose loads do not wait for each other, and
then visits no key that every one of its rows is forbidden to see. A key is hidden where a bool mask is false, or where what is added to
its score is -inf; a large negative number hides nothing: a row of nothing else weighs its keys by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy
import torch
from dsi.ir import tile as t

from .attention_tiles import AttentionTiles
from .builder import Block
from .layout import Interner
from .statistics import divisible

NEVER = 2**30  # behind every key; rounded up to a block it is still a 32-bit integer


@dataclass(frozen=True)
class Seen:
    """Sources of the first key that some row sees and the end of those (no key: the first is behind the end); and, where asked for, of
    the keys that every row sees as far as they are an interval, else of an empty one."""

    first: str
    end: str
    first_common: str = "0"
    end_common: str = "0"


def rows_of_mask(plan: t.AttentionPlan, one_query: bool) -> str:
    """What a mask's rows are: "m" where heads of a group differ, "q" where only queries do, "" where all rows are alike."""
    symbols = _symbols(plan)
    if t.H in symbols and plan.heads != plan.kv_heads:
        return "m"
    return "q" if t.S in symbols and not one_query else ""


def scannable(plan: t.AttentionPlan) -> bool:
    """Whether there is a mask, and it may hide some keys and show others."""
    return t.J in _symbols(plan)


def _symbols(plan: t.AttentionPlan) -> frozenset[sympy.Symbol]:
    return Interner().symbols(plan.mask) if plan.mask is not None else frozenset()


def queries_of_block(group: int, block_m: int, most: int | None) -> int:
    """Queries, padded, that a block of rows may belong to; `most`: of all rows, None where that is not known."""
    if most is not None and most * group <= block_m:
        height = most
    else:
        height = block_m // group if block_m % group == 0 else -(-block_m // group) + 1
    return 1 << (height - 1).bit_length()


def scan(kernel: AttentionTiles, count: sympy.Expr | str, key: Callable[[str], str], end: str, common: bool = False) -> Seen:
    """Writes the scan of `count` keys, `choice.block_s` a step. `key` gives the source of a key from the name of its number among the keys
    looked at, `end` is the source of an end of all keys."""
    builder, body, step = kernel.builder, kernel.builder.body, kernel.choice.block_s
    builder.constant("BLOCK_S", step)
    one_step = not isinstance(count, str) and count.is_Integer and int(count) <= step
    names = {name: builder.names.new(name) for name in ("j_seen", "s_seen", "first_seen", "end_seen", "number")}
    names |= {name: builder.names.new(name) for name in ("first_common", "end_common", "common")} if common else {}
    body.comment("the keys that any row may see" + (", and those that every row does" if common else ""))
    rows, all_rows, masked = _rows(kernel, names["s_seen"])
    if not one_step:
        body.line(f"{names['first_seen']} = tl.full([BLOCK_S], {NEVER}, tl.int32)")
        body.line(f"{names['end_seen']} = tl.zeros([BLOCK_S], tl.int32)")
        if common:
            body.line(f"{names['first_common']} = tl.full([BLOCK_S], {NEVER}, tl.int32)")
            body.line(f"{names['end_common']} = tl.zeros([BLOCK_S], tl.int32)")
            body.line(f"{names['common']} = tl.zeros([BLOCK_S], tl.int32)")
    block = body if one_step else Block(body)
    start, number = builder.names.new("seen"), names["number"]
    place, numbers = key(number), "tl.arange(0, BLOCK_S)" if one_step else f"{start} + tl.arange(0, BLOCK_S)"
    if place.count(number) > 1:
        block.line(f"{number} = {numbers}")
    else:
        place = place.replace(number, numbers)
    block.line(f"{names['j_seen']} = {place}")
    block.line(f"{builder.names.new(names['j_seen'] + '_in')} = {names['j_seen']} < {end}")
    some, every = _visible(kernel, block, rows, all_rows, masked, names)
    j = names["j_seen"]

    def gather(name: str, function: str, value: str) -> None:
        value = f"tl.{function}({value}, 0)" if one_step else value
        wide = {"min": f"tl.minimum({name}, {value})", "max": f"tl.maximum({name}, {value})", "sum": f"{name} + {value}"}
        block.line(f"{name} = {value if one_step else wide[function]}")

    found = [("first_seen", "min", f"tl.where({some}, {j}, {NEVER})"), ("end_seen", "max", f"tl.where({some}, {j} + 1, 0)")]
    if common:
        found += [("first_common", "min", f"tl.where({every}, {j}, {NEVER})"), ("end_common", "max", f"tl.where({every}, {j} + 1, 0)")]
        found += [("common", "sum", f"{every}.to(tl.int32)")]
    for name, function, value in found:
        gather(names[name], function, value)
    if not one_step:
        body.attach(f"for {start} in range(0, {kernel.size(count) if isinstance(count, sympy.Expr) else count}, BLOCK_S):", block)
        for name, function, _ in found:
            body.line(f"{names[name]} = tl.{function}({names[name]}, 0)")
    if not common:
        return Seen(names["first_seen"], names["end_seen"])
    body.comment("with a gap between them they count as none")
    gap = builder.names.new("gapless")
    body.line(f"{gap} = {names['common']} == {names['end_common']} - {names['first_common']}")
    for name in ("first_common", "end_common"):
        body.line(f"{names[name]} = tl.where({gap}, {names[name]}, 0)")
    return Seen(names["first_seen"], names["end_seen"], names["first_common"], names["end_common"])


def bits_of_parts(kernel: AttentionTiles, end: str, run: str) -> str:
    """Writes a look at the whole mask, `choice.block_s` keys a step, for a kernel of which part p has the p-th run of `run` keys alone;
    returns the source of an integer with a bit for each part that holds a key that some row sees. Its loads are written here, its end is
    where the source is used."""
    builder, body, step = kernel.builder, kernel.builder.body, kernel.choice.block_s
    builder.constant("BLOCK_S", step)
    names = {name: builder.names.new(name) for name in ("j_seen", "s_seen")}
    body.comment("which keys any row may see")
    rows, all_rows, masked = _rows(kernel, names["s_seen"])
    one_step = int(kernel.keys) <= step
    block, start, bits = body if one_step else Block(body), builder.names.new("seen"), builder.names.new("bits")
    if not one_step:
        body.line(f"{bits} = tl.zeros([BLOCK_S], tl.int32)")
    block.line(f"{names['j_seen']} = {'' if one_step else f'{start} + '}tl.arange(0, BLOCK_S)")
    ended = not (end == kernel.size(kernel.keys) and divisible(kernel.keys, step))
    if ended:
        block.line(f"{builder.names.new(names['j_seen'] + '_in')} = {names['j_seen']} < {end}")
    some, _ = _visible(kernel, block, rows, all_rows, masked, names, ended=ended)
    part = f"({names['j_seen']} // {run})"
    found = f"tl.where({some}, 1 << {part}, 0)"
    block.line(f"{bits} = {found if one_step else f'{bits} | {found}'}")
    if not one_step:
        body.attach(f"for {start} in range(0, {kernel.size(kernel.keys)}, BLOCK_S):", block)
    return f"tl.reduce_or({bits}, 0)"


def keys_in_sight(kernel: AttentionTiles) -> str:
    """Writes which of a block of the program's keys some row sees; returns the name."""
    names = {"j_seen": kernel.keys_at, "s_seen": kernel.builder.names.new("s_seen")}
    rows, all_rows, masked = _rows(kernel, names["s_seen"])
    some, _ = _visible(kernel, kernel.builder.body, rows, all_rows, masked, names, "BLOCK_J", kernel.key_mask)
    return some


def _rows(kernel: AttentionTiles, s_seen: str) -> tuple[str, str, bool]:
    """Writes the queries whose masks are looked at; returns the axis, the number of rows that count, and whether rows are masked."""
    choice, body = kernel.choice, kernel.builder.body
    axis = rows_of_mask(kernel.plan, kernel.queries == 1)
    if axis == "":
        return "", "1", False
    if axis == "m":
        whole = "BLOCK_M" if kernel.one_block else "row_block * BLOCK_M"
        rows = kernel.size(kernel.rows)
        count = rows if kernel.one_block else f"tl.minimum(BLOCK_M, {rows} - {whole})"
        return "m", count if kernel.row_mask else "BLOCK_M", kernel.row_mask
    most = int(kernel.queries) if kernel.queries.is_Integer else choice.max_rows
    height = queries_of_block(kernel.group, choice.block_m, most)
    kernel.builder.constant("BLOCK_Q", height)
    masked = not divisible(kernel.queries, height) or not (choice.block_m % kernel.group == 0 or kernel.one_block)
    first = "" if kernel.one_block else f"{kernel.first_query} + "
    queries = kernel.size(kernel.queries)
    body.line(f"{s_seen} = {first}tl.arange(0, BLOCK_Q)")
    if not masked:
        return "q", "BLOCK_Q", False
    body.line(f"{kernel.builder.names.new(s_seen + '_in')} = {s_seen} < {queries}")
    return "q", queries if kernel.one_block else f"tl.minimum(BLOCK_Q, {queries} - {kernel.first_query})", True


def _visible(
    kernel: AttentionTiles,
    block: Block,
    rows: str,
    count: str,
    masked: bool,
    names: dict[str, str],
    width: str = "BLOCK_S",
    ended: bool = True,
) -> tuple[str, str]:
    """Writes which keys of a step of `width` some row sees, and which every row does; returns the names. `ended`: some may be behind the
    end."""
    mask, new = kernel.plan.mask, kernel.builder.names.new
    assert mask is not None
    axes = (rows, "j") if rows else ("j",)
    renamed = {"j": names["j_seen"], **({"s": names["s_seen"], "q": names["s_seen"]} if rows == "q" else {})}
    tile = kernel.tile(*axes, names=renamed, masked={"j": ended, "q": masked})
    tile.shape = (*tile.shape[:-1], width)
    printer = kernel.within(block, tile)
    printer.expect([mask])
    text = printer.value(mask)
    seen = text.at(3) if mask.dtype == torch.bool else f'({text.at(1)} != float("-inf"))'
    conditions = [seen, *tile.masks.values()]
    code = " & ".join(conditions)
    if text.axes | frozenset(tile.masks) != frozenset(range(len(axes))):
        code = f"tl.broadcast_to({code}, {tile.dims(range(len(axes)))})"
    visible = new("visible")
    block.line(f"{visible} = {code}")
    if not rows:
        return visible, visible
    seeing, some, every = new("rows_that_see"), new("some"), new("every")
    block.line(f"{seeing} = tl.sum({visible}.to(tl.int32), 0)")
    block.line(f"{some} = {seeing} > 0")
    block.line(f"{every} = {seeing} == {count}")
    return some, every


def greatest(sources: Sequence[str]) -> str:
    """Source of the greatest of integers."""
    return _extreme(sources, max, "tl.maximum")


def least(sources: Sequence[str]) -> str:
    """Source of the least of integers."""
    return _extreme(sources, min, "tl.minimum")


def _extreme(sources: Sequence[str], of_numbers: Callable[[list[int]], int], function: str) -> str:
    numbers = [int(source) for source in sources if source.lstrip("-").isdigit()]
    parts = [*([str(of_numbers(numbers))] if numbers else []), *(s for s in dict.fromkeys(sources) if not s.lstrip("-").isdigit())]
    text = parts[0]
    for part in parts[1:]:
        text = f"{function}({text}, {part})"
    return text
