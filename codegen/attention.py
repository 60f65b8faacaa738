"""The schedule of attention regions: one pass over the keys with a running softmax.

A program owns one batch entry, one key/value head, and a block of its rows: the query heads that share the key head, for consecutive
queries (row m is query m // group, head m % group of the group). Keys and values are read once for the whole group. Scores, softmax and
sums are fp32.
"""

from __future__ import annotations

from dataclasses import replace

import sympy
import torch
from dsi.ir import tile as t

from .builder import Block, Builder, triton_type
from .columns import ceil_div
from .cost import power_of_two
from .integers import normalise
from .kernel import Choice
from .pointwise import literal
from .printer import Bound, Printer, Text, Tile, conjunction, unrounded
from .statistics import divisible


class Attention:
    """Writes the kernel of one attention plan under one choice of blocks (`block_m` rows, `block_n` keys a step)."""

    def __init__(self, spec: t.KernelSpec, choice: Choice):
        assert isinstance(spec.plan, t.AttentionPlan)
        self.spec, self.plan, self.choice = spec, spec.plan, choice
        self.builder = Builder(spec)
        plan = self.plan
        self.group = plan.heads // plan.kv_heads
        self.queries = sympy.Integer(1) if choice.max_rows == 1 else sympy.sympify(plan.queries)
        self.keys = sympy.sympify(plan.keys)
        self.rows = self.queries * self.group
        self.ieee = ', input_precision="ieee"' if plan.dtype == torch.float32 else ""
        self.padded = {"D": power_of_two(max(plan.head_size, 16)), "E": power_of_two(max(plan.value_size, 16))}
        number = sympy.Integer
        self.limits = {
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
        self.row_mask = not divisible(self.rows, choice.block_m)
        self.key_mask = not divisible(self.keys, choice.block_n)
        self.one_block = self.rows.is_Integer and int(self.rows) <= choice.block_m

    def tile(self, first: str, second: str) -> Tile:
        """A tile over two of "m" (rows), "j", "d", "e"."""
        sizes = {"m": "BLOCK_M", "j": "BLOCK_J", "d": "BLOCK_D", "e": "BLOCK_E"}
        tile = Tile((sizes[first], sizes[second]), {}, fixed=dict(self.fixed), limits=dict(self.limits))
        for symbol, name in ((t.B, "b"), (t.G, "g")):
            if symbol not in self.fixed:
                tile.bound[symbol] = Bound(name)
        masks = {
            "m": self.row_mask,
            "j": self.key_mask,
            "d": self.padded["D"] != self.plan.head_size,
            "e": self.padded["E"] != self.plan.value_size,
        }
        symbols = {"m": (t.H, t.S), "j": (t.J,), "d": (t.D,), "e": (t.E,)}
        names = {t.H: "h", t.S: "s", t.J: "j", t.D: "d", t.E: "e"}
        for axis, letter in enumerate((first, second)):
            subscript = ("[:, None]", "[None, :]")[axis]
            for symbol in symbols[letter]:
                if symbol not in self.fixed:
                    tile.bound[symbol] = Bound(names[symbol] + subscript, frozenset((axis,)))
            if masks[letter]:
                tile.masks[axis] = f"{letter}_in{subscript}"
        return tile

    def write(self) -> tuple[Builder, tuple[sympy.Expr, ...]]:
        """Writes the whole body and returns the builder and the launch grid."""
        plan, choice, builder, body = self.plan, self.choice, self.builder, self.builder.body
        for name in ("b", "g", "h", "s", "j", "d", "e", "m", "m_in", "j_in", "d_in", "e_in", "j0", "top", "total", "out", "scores"):
            builder.names.new(name)
        for name, value in (("M", choice.block_m), ("J", choice.block_n), ("D", self.padded["D"]), ("E", self.padded["E"])):
            builder.constant(f"BLOCK_{name}", value)
        scalar = Printer(builder, body, Tile((), {}, fixed=dict(self.fixed)))
        self.size = lambda expr, strength=1: scalar.integer(normalise(expr), strength)
        # Rows first: no other grid dimension may exceed 65535.
        if t.G not in self.fixed:
            body.line("g = tl.program_id(1)")
        if t.B not in self.fixed:
            body.line("b = tl.program_id(2)")
        body.comment(f"row m: query m // {self.group}, head m % {self.group} of the group" if self.group > 1 else "row m: query m")
        body.line("m = tl.arange(0, BLOCK_M)" if self.one_block else "m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)")
        if self.row_mask:
            body.line(f"m_in = m < {self.size(self.rows)}")
        if t.S not in self.fixed:
            body.line(f"s = m // {self.group}" if self.group > 1 else "s = m")
        if t.H not in self.fixed:
            within = "m" if self.queries == 1 else f"m % {self.group}"
            body.line(f"h = g * {self.group} + {within}" if t.G not in self.fixed else f"h = {within}")
        for letter, size in (("d", plan.head_size), ("e", plan.value_size)):
            body.line(f"{letter} = tl.arange(0, BLOCK_{letter.upper()})")
            if self.padded[letter.upper()] != size:
                body.line(f"{letter}_in = {letter} < {size}")
        q = self.operand(Printer(builder, body, self.tile("m", "d")), plan.q, "q", "[BLOCK_M, BLOCK_D]")
        body.line('top = tl.full([BLOCK_M], float("-inf"), tl.float32)')
        body.line("total = tl.zeros([BLOCK_M], tl.float32)")
        body.line("out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)")
        self.keys_loop(q)
        body.comment("a row that sees no key is 0")
        body.line("out = out / tl.where(total == 0.0, 1.0, total)[:, None]")
        tile = self.tile("m", "e")
        tile.accumulators = {(0, 0): Text("out", frozenset((0, 1)))}
        printer = Printer(builder, body, tile)
        printer.expect(store.value for store in plan.stores)
        for store in plan.stores:
            printer.store(store)
        blocks = ceil_div(self.rows, choice.block_m)
        if self.queries == 1 and plan.queries != 1:
            # One query at most: without any there is nothing to launch.
            blocks = sympy.sympify(plan.queries) * blocks
        return builder, (blocks, sympy.Integer(plan.kv_heads), sympy.sympify(plan.batch))

    def operand(self, printer: Printer, expr: t.Expr, hint: str, shape: str) -> str:
        """A block of q, k or v in the dtype of the products."""
        dtype = self.plan.dtype
        expr = unrounded(expr, dtype)
        bare = isinstance(expr, t.Load) and expr.dtype == dtype
        printer.expect([expr])
        text = printer.load(expr, raw=True, hint=hint) if isinstance(expr, t.Load) and bare else printer.value(expr, name=True)
        code = text.code
        axes = text.axes
        # Beyond its size a computed value, or a load that repeats one value along the axis, need not be 0, and the padding takes part in
        # the product.
        beyond = [axis for axis, mask in printer.tile.masks.items() if mask.startswith(("d_in", "e_in", "j_in"))]
        if padding := [axis for axis in beyond if not bare or axis not in axes]:
            code = f"tl.where({conjunction([printer.tile.masks[axis] for axis in padding])}, {code}, 0.0)"
            axes |= frozenset(padding)
        if not bare and dtype != torch.float32:
            code = f"{code}.to({triton_type(dtype)})"
        if axes != frozenset((0, 1)):
            code = f"tl.broadcast_to({code}, {shape})"
        return printer.statement(code, frozenset((0, 1)), hint).code

    def query(self, row: str) -> str:
        """Source of the query that a row belongs to."""
        return row if self.group == 1 else f"({row}) // {self.group}"

    def bounds(self) -> tuple[str, str]:
        """First key block and end of the keys that any row of the block may see."""
        plan, body = self.plan, self.builder.body
        first, end = "0", self.size(self.keys)
        if self.queries == 1:
            # The only query sits at position 0.
            return first, (self.size(sympy.Min(1, self.keys)) if plan.causal else end)
        names = self.builder.names
        if plan.causal:
            last = names.new("last_query")
            body.line(f"{last} = {self.query('tl.program_id(0) * BLOCK_M + BLOCK_M - 1')}")
            stop = names.new("stop")
            body.line(f"{stop} = tl.minimum({end}, {last} + 1)")
            end = stop
        if plan.window:
            low = names.new("start")
            body.line(f"{low} = tl.maximum({self.query('tl.program_id(0) * BLOCK_M')} - {plan.window - 1}, 0) // BLOCK_J * BLOCK_J")
            first = low
        return first, end

    def keys_loop(self, q: str) -> None:
        """The loop over blocks of keys."""
        plan, builder = self.plan, self.builder
        first, end = self.bounds()
        loop = Block(builder.body)
        loop.line("j = j0 + tl.arange(0, BLOCK_J)")
        if self.key_mask:
            loop.line(f"j_in = j < {self.size(self.keys)}")

        def over(one: str, other: str) -> Printer:
            tile = self.tile(one, other)
            outside = replace(tile, bound={s: b for s, b in tile.bound.items() if s != t.J}, masks={})
            outside.masks = {a: m for a, m in tile.masks.items() if not m.startswith("j_in")}
            return Printer(builder, loop, tile, Printer(builder, builder.body, outside), hoist=True)

        k = self.operand(over("d", "j"), plan.k, "k", "[BLOCK_D, BLOCK_J]")
        loop.line(f"scores = tl.dot({q}, {k}{self.ieee}) * {literal(float(plan.scale))[0]}")
        if plan.softcap:
            builder.use("tanh")
            loop.line(f"scores = tanh(scores / {plan.softcap!r}) * {plan.softcap!r}")
        scores = over("m", "j")
        scores.expect([e for e in (plan.bias, plan.mask) if e is not None])
        if plan.bias is not None:
            loop.line(f"scores += {scores.value(plan.bias).code}")
        conditions = [f"{scores.tile.masks[1]}"] if 1 in scores.tile.masks else []
        position = "s[:, None]" if t.S not in self.fixed else "0"
        if plan.causal:
            conditions.append(f"(j[None, :] <= {position})")
        if plan.window:
            conditions.append(f"(j[None, :] > {position} - {plan.window})")
        if plan.mask is not None:
            mask = scores.value(plan.mask)
            if plan.mask.dtype == torch.bool:
                conditions.append(mask.at(3))
            else:
                loop.line(f"scores += {mask.code}")
        if conditions:
            loop.line(f'scores = tl.where({" & ".join(conditions)}, scores, float("-inf"))')
        new = builder.names.new("new_top")
        shift = builder.names.new("shift")
        weights = builder.names.new("weights")
        decay = builder.names.new("decay")
        loop.line(f"{new} = tl.maximum(top, tl.max(scores, 1))")
        loop.comment("while a row has seen no key its maximum is -inf, and no difference may be taken")
        loop.line(f'{shift} = tl.where({new} == float("-inf"), 0.0, {new})')
        loop.line(f"{weights} = tl.exp(scores - {shift}[:, None])")
        loop.line(f"{decay} = tl.exp(top - {shift})")
        loop.line(f"total = total * {decay} + tl.sum({weights}, 1)")
        v = self.operand(over("j", "e"), plan.v, "v", "[BLOCK_J, BLOCK_E]")
        if plan.dtype != torch.float32:
            weights = f"{weights}.to({triton_type(plan.dtype)})"
        loop.line(f"out = tl.dot({weights}, {v}, out * {decay}[:, None]{self.ieee})")
        loop.line(f"top = {new}")
        builder.body.attach(f"for j0 in range({first}, {end}, BLOCK_J):", loop)
