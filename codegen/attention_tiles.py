"""What the attention schedules share: rows, channels and keys as axes of tiles, the operands of the products, scores and their weights.

A program owns one batch entry, one key/value head, and a block of its rows: the query heads that share the key head, for consecutive
queries (row m is query m // group, head m % group of the group). Keys and values are read once for the whole group. Scores, softmax and
sums are fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch
from dsi.ir import tile as t

from .builder import Block, Builder, triton_type
from .columns import ceil_div
from .integers import normalise
from .kernel import Choice
from .pointwise import literal
from .printer import SUBSCRIPTS, Bound, Printer, Text, Tile, conjunction, unrounded
from .statistics import divisible

LEAST_OF_A_PRODUCT = 16  # channels that matrix units multiply at once


@dataclass(frozen=True)
class Channels:
    """Channels of a head that are multiplied together: `size` of them from `start` on, padded to `width`. `name` is their block
    variable, `block` the constant that holds the width."""

    symbol: sympy.Symbol
    name: str
    block: str
    start: int
    size: int
    width: int


def cut(letter: str, size: int, together: int, least: int) -> tuple[Channels, ...]:
    """A head's channels in parts of `together`, the last padded to a power of two: 80 by 64 is 64 and 16, where one part is 128."""
    parts = []
    for number, start in enumerate(range(0, size, together)):
        some = min(together, size - start)
        suffix = f"_{number}" if number else ""
        width = max(1 << (some - 1).bit_length(), least)
        parts.append(Channels({"d": t.D, "e": t.E}[letter], letter + suffix, f"BLOCK_{letter.upper()}{suffix}", start, some, width))
    return tuple(parts)


class AttentionTiles:
    """One attention plan under one choice of blocks: `block_m` rows, `block_n` keys a step, `block_k` channels at once (1: all)."""

    matrix = True  # products by matrix units
    by_warp = False  # maxima of scores and sums of weights lie along channels
    keys_at = "j"  # the block variable of keys

    def __init__(self, spec: t.KernelSpec, choice: Choice):
        assert isinstance(spec.plan, t.AttentionPlan)
        self.spec, self.plan, self.choice = spec, spec.plan, choice
        self.builder = Builder(spec)
        plan, number = self.plan, sympy.Integer
        self.group = plan.heads // plan.kv_heads
        self.queries = number(1) if choice.max_rows == 1 else sympy.sympify(plan.queries)
        self.keys = sympy.sympify(plan.keys)
        self.rows = self.queries * self.group
        most = int(self.queries) if self.queries.is_Integer else choice.max_rows
        self.one_block = most is not None and most * self.group <= choice.block_m
        self.limits: dict[sympy.Symbol, tuple[sympy.Expr, ...]] = {
            t.B: (sympy.sympify(plan.batch),),
            t.G: (number(plan.kv_heads),),
            t.H: (number(plan.heads),),
            t.S: (self.queries, *((number(choice.max_rows),) if choice.max_rows else ())),
            t.J: (self.keys,),
            t.D: (number(plan.head_size),),
            t.E: (number(plan.value_size),),
        }
        self.fixed: dict[sympy.Symbol, sympy.Expr] = {}
        if plan.batch == 1:
            self.fixed[t.B] = number(0)
        if plan.kv_heads == 1:
            self.fixed[t.G] = number(0)
        if self.queries == 1:
            self.fixed[t.S] = number(0)
        if self.group == 1:
            self.fixed[t.H] = number(0) if plan.kv_heads == 1 else t.G
        self.single = not self.matrix and self.rows == 1  # tiles have no axis of rows
        self.row_mask = not self.single and not divisible(self.rows, choice.block_m)
        self.key_mask = not divisible(self.keys, choice.block_n)
        least = LEAST_OF_A_PRODUCT if self.matrix else 1
        together = choice.block_k if choice.block_k >= least and choice.block_k > 1 else 1 << 30
        self.d, self.e = cut("d", plan.head_size, together, least), cut("e", plan.value_size, together, least)
        self.ieee = ', input_precision="ieee"' if plan.dtype == torch.float32 else ""
        # Weights are powers of 2: one multiplication scales a score and changes the base. What is added to scores, as large as it may be
        # (a mask of the lowest finite number), is not scaled.
        additive = plan.bias is not None or (plan.mask is not None and plan.mask.dtype != torch.bool)
        self.q: list[str] = []
        self.outs: list[str] = []
        self.scaled = bool(plan.softcap) or additive or not plan.scale > 0
        self.factor = None if additive else math.log2(math.e) * (1.0 if self.scaled else float(plan.scale))

    # ------------------------------------------------------------------------------------------------------------------ tiles

    def shape(self, *axes: str | Channels) -> str:
        """Source of the shape of a tile."""
        sizes = [axis.block if isinstance(axis, Channels) else f"BLOCK_{axis.upper()}" for axis in axes if axis != "m" or not self.single]
        return f"[{', '.join(sizes)}]"

    def tile(self, *axes: str | Channels, names: dict[str, str] | None = None, masked: dict[str, bool] | None = None) -> Tile:
        """A tile over rows "m", keys "j", queries "q", or channels; rows are left out where a program has one.

        `names` gives other block variables than the letters' own ("s" is the query's, and "h" the head's), `masked` whether an axis needs
        a mask where it differs from the kernel's.
        """
        names, masked = {"j": self.keys_at, **(names or {})}, {"m": self.row_mask, "q": self.row_mask, "j": self.key_mask, **(masked or {})}
        axes = tuple(axis for axis in axes if axis != "m" or not self.single)
        tile = Tile((), {}, fixed=dict(self.fixed), limits=dict(self.limits))
        tile.shape = tuple(axis.block if isinstance(axis, Channels) else f"BLOCK_{axis.upper()}" for axis in axes)
        for symbol, name in ((t.B, "b"), (t.G, "g")):
            if symbol not in self.fixed:
                tile.bound[symbol] = Bound(name)
        symbols = {"m": {t.H: "h", t.S: "s"}, "q": {t.S: "s"}, "j": {t.J: "j"}}
        for number, axis in enumerate(axes):
            subscript = SUBSCRIPTS[len(axes)][number]
            here = {axis.symbol: axis.name} if isinstance(axis, Channels) else symbols[axis]
            for symbol, name in here.items():
                if symbol not in self.fixed:
                    tile.bound[symbol] = Bound(names.get(name, name) + subscript, frozenset((number,)))
            variable = axis.name if isinstance(axis, Channels) else names.get(axis, axis)
            if axis.width != axis.size if isinstance(axis, Channels) else masked[axis]:
                tile.masks[number] = f"{variable}_in{subscript}"
        return tile

    def without_keys(self, tile: Tile) -> Tile:
        """A tile as it is outside of the loop over the keys."""
        bound = {symbol: value for symbol, value in tile.bound.items() if symbol != t.J}
        masks = {axis: mask for axis, mask in tile.masks.items() if not mask.startswith("j")}
        return replace(tile, bound=bound, masks=masks)

    def within(self, block: Block, tile: Tile) -> Printer:
        """A printer of what changes from key to key; the rest is written before the loop."""
        return Printer(self.builder, block, tile, Printer(self.builder, self.builder.body, self.without_keys(tile)), hoist=True)

    def size(self, expr: sympy.Expr | int, strength: int = 1) -> str:
        """Source of a size."""
        return Printer(self.builder, self.builder.body, Tile((), {}, fixed=dict(self.fixed))).integer(normalise(expr), strength)

    # ---------------------------------------------------------------------------------------------------------------- program

    def open(self, block: str) -> None:
        """Writes which rows and channels are the program's, and waits for the kernels before; `block` is the source of its block of
        rows."""
        plan, choice, builder, body = self.plan, self.choice, self.builder, self.builder.body
        names = ("b", "g", "h", "s", "j", "m", "m_in", "j_in", "j0", "top", "total", "scores", "shift", "weights", "decay", "row_block")
        for name in (*names, *(f"{part.name}{suffix}" for part in (*self.d, *self.e) for suffix in ("", "_in"))):
            builder.names.new(name)
        builder.start(body, behind_wait=choice.overlaps)
        # Rows first: no other grid dimension may exceed 65535.
        if t.G not in self.fixed:
            body.line("g = tl.program_id(1)")
        if t.B not in self.fixed:
            body.line("b = tl.program_id(2)")
        if not self.single:
            builder.constant("BLOCK_M", choice.block_m)
            body.comment(f"row m: query m // {self.group}, head m % {self.group} of the group" if self.group > 1 else "row m: query m")
            if not self.one_block:
                body.line(f"row_block = {block}")
            body.line("m = tl.arange(0, BLOCK_M)" if self.one_block else "m = row_block * BLOCK_M + tl.arange(0, BLOCK_M)")
            if self.row_mask:
                body.line(f"m_in = m < {self.size(self.rows)}")
            if t.S not in self.fixed:
                body.line(f"s = m // {self.group}" if self.group > 1 else "s = m")
            if t.H not in self.fixed:
                within = "m" if self.queries == 1 else f"m % {self.group}"
                body.line(f"h = g * {self.group} + {within}" if t.G not in self.fixed else f"h = {within}")
        builder.constant("BLOCK_J", choice.block_n)
        for part in (*self.d, *self.e):
            builder.constant(part.block, part.width)
            start = f"{part.start} + " if part.start else ""
            body.line(f"{part.name} = {start}tl.arange(0, {part.block})")
            if part.width != part.size:
                size = plan.head_size if part.symbol == t.D else plan.value_size
                body.line(f"{part.name}_in = {part.name} < {size}")
        self.ahead()
        builder.wait(body)

    def ahead(self) -> None:
        """Writes what may come before the wait."""

    def named(self, hint: str, code: str) -> str:
        """A name for a scalar, unless it is a number or one already."""
        if code.isidentifier() or code.isdigit():
            return code
        name = self.builder.names.new(hint)
        self.builder.body.line(f"{name} = {code}")
        return name

    def query(self, row: str) -> str:
        """Source of the query that a row belongs to."""
        return row if self.group == 1 else f"({row}) // {self.group}"

    @property
    def first_query(self) -> str:
        """Source of the block's first query."""
        return "0" if self.one_block else self.query("row_block * BLOCK_M")

    @property
    def last_query(self) -> str:
        """Source of a query that none of the block's rows is behind."""
        if self.one_block:
            return str(int(self.queries) - 1) if self.queries.is_Integer else f"({self.size(self.queries)} - 1)"
        return self.query("row_block * BLOCK_M + BLOCK_M - 1")

    def load_queries(self) -> None:
        """Writes the loads of q, and names the sums of the output."""
        body = self.builder.body
        tiles = [(self.tile("m", part), self.shape("m", part)) for part in self.d]
        self.q = [self.operand(Printer(self.builder, body, tile), self.plan.q, "q", shape) for tile, shape in tiles]
        self.outs = [self.builder.names.new("out") for _ in self.e]

    def grid(self, split: int = 1) -> tuple[sympy.Expr, ...]:
        """Programs: blocks of rows (times the programs that share one), key heads, batch entries."""
        blocks = ceil_div(self.rows, self.choice.block_m)
        if self.queries == 1 and self.plan.queries != 1:
            # One query at most: without any there is nothing to launch.
            blocks = sympy.sympify(self.plan.queries) * blocks
        return blocks * split, sympy.Integer(self.plan.kv_heads), sympy.sympify(self.plan.batch)

    # --------------------------------------------------------------------------------------------------------------- operands

    def operand(self, printer: Printer, expr: t.Expr, hint: str, shape: str, whole: bool = True) -> str:
        """A block of q, k or v in the dtype of the products (fp32 where no matrix units multiply). `whole`: along every axis of the
        tile."""
        dtype = self.plan.dtype
        expr = unrounded(expr, dtype)
        bare = isinstance(expr, t.Load) and expr.dtype == dtype
        printer.expect([expr])
        text = printer.load(expr, raw=self.matrix, hint=hint) if isinstance(expr, t.Load) and bare else printer.value(expr, name=True)
        code = text.code
        axes = text.axes
        # Beyond its size a computed value, or a load that repeats one value along the axis, need not be 0, and the padding takes part in
        # the product.
        beyond = [axis for axis, mask in printer.tile.masks.items() if not mask.startswith("m_in")]
        if padding := [axis for axis in beyond if not bare or axis not in axes]:
            code = f"tl.where({conjunction([printer.tile.masks[axis] for axis in padding])}, {code}, 0.0)"
            axes |= frozenset(padding)
        if not bare and dtype != torch.float32:
            code = f"{code}.to({triton_type(dtype)})" + ("" if self.matrix else ".to(tl.float32)")
        every = frozenset(range(len(printer.tile.shape)))
        if whole and axes != every:
            code, axes = f"tl.broadcast_to({code}, {shape})", every
        return printer.statement(code, axes, hint).code

    # ----------------------------------------------------------------------------------------------------------------- scores

    def score(self, block: Block, *axes: str, product: str, sight: bool) -> None:
        """Writes `scores` over a tile's axes from the source of the products: scaled (where no later step does it), capped, with what is
        added; hidden keys at -inf where `sight`."""
        plan, builder = self.plan, self.builder
        if plan.softcap:
            builder.use("tanh")
            product = f"tanh(({product}) * {literal(plan.scale / plan.softcap)[0]}) * {plan.softcap!r}"
        elif self.scaled:
            product = f"({product}) * {literal(float(plan.scale))[0]}" if " " in product else f"{product} * {literal(float(plan.scale))[0]}"
        if product != "scores":
            block.line(f"scores = {product}")
        printer = self.within(block, self.tile(*axes))
        printer.expect([e for e in (plan.bias, plan.mask) if e is not None])
        if plan.bias is not None:
            block.line(f"scores += {printer.value(plan.bias).code}")
        if plan.mask is not None and plan.mask.dtype != torch.bool:
            block.line(f"scores += {printer.value(plan.mask).code}")
        conditions = list(self.hidden(printer, axes)) if sight else []
        if conditions:
            block.line(f'scores = tl.where({" & ".join(conditions)}, scores, float("-inf"))')

    def hidden(self, printer: Printer, axes: Sequence[str]) -> Sequence[str]:
        """Sources of the conditions under which a row sees a key."""
        plan, tile = self.plan, printer.tile
        key = tile.bound[t.J].code
        axis = max(tile.bound[t.J].axes)
        conditions = [tile.masks[axis]] if axis in tile.masks else []
        query = tile.bound[t.S].code if t.S in tile.bound else "0"
        if plan.causal:
            conditions.append(f"({key} <= {query})")
        if plan.window:
            conditions.append(f"({key} > {query} - {plan.window})")
        if plan.mask is not None and plan.mask.dtype == torch.bool:
            conditions.append(printer.value(plan.mask).at(3))
        return conditions

    def shift(self, top: str) -> str:
        """Source of what is subtracted from (scaled) scores, given their maximum: 0 while a row has seen no key, since no difference of
        infinities may be taken."""
        shift = f'tl.where({top} == float("-inf"), 0.0, {top})'
        return shift if self.factor is None else f"{shift} * {self.factor!r}"

    def weight(self, score: str, shift: str) -> str:
        """Source of the weight of a score."""
        return f"tl.exp({score} - {shift})" if self.factor is None else f"tl.exp2({score} * {self.factor!r} - {shift})"

    # ----------------------------------------------------------------------------------------------------------------- result

    def finish(self, block: Block, outs: Sequence[str], total: str = "total", top: str = "top") -> None:
        """Divides by the sum of the weights, which are relative to the score `top`, and writes the epilogue, part by part of the
        channels."""
        names, rows = self.builder.names, "" if self.single else "[:, None]"
        if self.plan.sinks is not None:
            sink = Printer(self.builder, block, self.tile("m")).value(self.plan.sinks).at(3)
            weight = f"tl.exp({sink} - ({self.shift(top)}))"
            if self.factor is not None:
                weight = f"tl.exp2({sink} * {math.log2(math.e)!r} - {self.shift(top)})"
            block.line(f"{total} += {weight}")
        block.comment("a row that sees no key is 0")
        weight = names.new("weight")
        block.line(f"{weight} = tl.where({total} == 0.0, 1.0, {total}){rows}")
        for part, out in zip(self.e, outs, strict=True):
            block.line(f"{out} = {out} / {weight}")
            tile = self.tile("m", part)
            tile.accumulators = {(0, 0): Text(out, frozenset(range(len(tile.shape))))}
            printer = Printer(self.builder, block, tile)
            printer.expect(store.value for store in self.plan.stores)
            for store in self.plan.stores:
                printer.store(store)
