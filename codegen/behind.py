"""A layer norm behind the product of `gemv`: the sums are corrected by mean and deviation, and no pass over the rows stands before them.

With gain g and bias b, and a row x with mean m and deviation d, a column of the weights w gives

    sum((x - m) / d * g * w + b * w) = (sum((x - c) g w) - (m - c) sum(g w)) / d + sum(b w)

for any c. So all sums are made side by side, and one exchange between the threads of a program ends them, where mean, deviation and
product would each need one, behind one another. sum(g w) and sum(b w) have nothing of the rows in them: where a program holds all of its
columns' weights, they are made before the kernel waits for the one before it.

c is the median of three elements of the row, which are read with the row itself. How far it lies from the mean decides what cancels in
the variance, sum((x - c)^2) / n - (m - c)^2: of c = m + r d the last log2(r^2) bits of fp32. Most elements of a row lie within a few
deviations. A few channels may lie far outside; for c to be one, two of the three elements must be, and even then r is at most
sqrt(n / 2), since so far away they make the deviation what it is. A row of equal elements has the variance 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy
from dsi.ir import tile as t

from .builder import Block
from .deferred import Affine, constant
from .integers import PRODUCT, normalise
from .printer import Printer, Text, Tile

if TYPE_CHECKING:
    from .linear import Bases
    from .products import Products, Sums, Tiles

Key = tuple[int, int]  # of a sum: window and part


class Behind:
    """What is summed beside the products of one set of columns, and how the sums are made one."""

    def __init__(self, products: Products, norm: Affine):
        self.products, self.norm = products, norm
        self.builder, self.plan = products.builder, products.plan
        (self.reduction,) = self.plan.reductions
        self.gained: dict[Key, str] = {}  # the weights times the gain, where they are made before the wait
        self.by_gain: Sums = {}  # names of sum(g w) and of sum(b w)
        self.by_bias: Sums = {}
        self.middle = Text("")  # c of each row
        self.total = self.squares = ""
        self.whole: set[str] = set()  # names of what has a value in every place of a tile
        self.single = products.linear.single
        self.axis = 1 if self.single else 2

    @property
    def roots(self) -> list[t.Expr]:
        """What of the prologue is printed at each element."""
        return [part for part in (self.reduction.body, self.norm.gain, self.norm.bias) if part is not None]

    # ------------------------------------------------------------------------------------------------------------------- ahead

    def ahead(self, tiles: Tiles, printer: Printer) -> None:
        """Makes the sums without rows before the wait, where all that they are made of is constant."""
        known, products = self.products.spec.constants, self.products
        loads = [load for part in self.roots[1:] for load in t.parts_of(part) if isinstance(load, t.Load)]
        scales = [window.scale for window in products.segment.windows if window.scale is not None]
        if not all(constant(load, known) for load in loads) or any(scale.group and scale.input not in known for scale in scales):
            return
        products.current = products.k
        block, names = printer.block, self.builder.names
        block.comment("sums without the rows, which the norm needs behind the product")
        gain, bias = self.values(printer)
        self.builder.use("early")
        for key, (name, axes) in tiles.items():
            wide = products.widened(printer, key, name)
            gained = self.gained[key] = names.new("gained")
            block.line(f"{gained} = {f'{gain} * {wide}' if gain else wide}")
            if self.single and axes >= {0, 1}:
                self.whole.add(gained)
            self.by_gain[key] = names.new("by_gain")
            if bias:
                self.by_bias[key] = names.new("by_bias")
                weighted = names.new("biased")
                block.line(f"{weighted} = {bias} * {wide}")
                self.whole |= {weighted} if gained in self.whole else set()
                self.exchange(block, [self.by_gain[key], self.by_bias[key]], [gained, weighted])
                block.line(f"{self.by_bias[key]} = early({self.by_bias[key]}, PDL)")
            else:
                block.line(f"{self.by_gain[key]} = tl.sum({gained}, {self.axis})")
            block.line(f"{self.by_gain[key]} = early({self.by_gain[key]}, PDL)")

    def values(self, printer: Printer) -> tuple[str, str]:
        """Gain and bias at each element, "" for none; 0 beyond the last, where weights are."""
        found = []
        k_axis = max(printer.tile.bound[t.K].axes)
        mask = printer.tile.masks.get(k_axis)
        for part in (self.norm.gain, self.norm.bias):
            text = None if part is None else printer.value(part, name=True)
            if text is not None and mask and not isinstance(part, t.Load):
                text = printer.statement(f"tl.where({mask}, {text.code}, 0.0)", text.axes | {k_axis}, "v")
            found.append("" if text is None else text.at(PRODUCT))
        return found[0], found[1]

    # -------------------------------------------------------------------------------------------------------------------- step

    def begin(self, sums: Sums, shape: str, statistics: Bases) -> None:
        """Reads what rows are lowered by; writes the sums that a loop adds to, all zero. `shape`: of a sum of products."""
        body, names, products = self.products.body, self.builder.names, self.products
        _, around = products.x_tile(products.k or "k", statistics)
        printer = products.outer(statistics).on(around)
        printer.expect([self.reduction.body])
        body.comment("what rows are lowered by, lest their mean is large beside what they differ by: the median of three elements")
        places = (0, int(products.inner) // 3, int(products.inner) * 2 // 3)
        few = [printer.value(self.reduction.body, ((t.K, sympy.Integer(at)),), name=True) for at in places]
        a, b, c = (text.code for text in few)
        code = f"tl.maximum(tl.minimum({a}, {b}), tl.minimum(tl.maximum({a}, {b}), {c}))"
        self.middle = printer.statement(code, few[0].axes | few[1].axes | few[2].axes, "middle")
        self.total, self.squares = names.new("total"), names.new("squares")
        if products.straight:
            return
        for name in (self.total, self.squares):
            body.line(f"{name} = tl.zeros({'[1, BLOCK_K]' if self.single else '[BLOCK_M, 1, BLOCK_K]'}, tl.float32)")
        self.whole |= set(sums.values())
        for key in sums:
            self.by_gain[key] = names.new("by_gain")
            if self.norm.bias is not None:
                self.by_bias[key] = names.new("by_bias")
            for others in (self.by_gain, self.by_bias):
                if key in others:
                    body.line(f"{others[key]} = tl.zeros({shape if self.single else shape.replace('BLOCK_M', '1')}, tl.float32)")
                    self.whole |= {others[key]} if self.single else set()

    def step(self, printer: Printer, tiles: Tiles, sums: Sums) -> None:
        """One step of all sums."""
        block, names = printer.block, self.builder.names
        printer.expect(self.roots)
        value = printer.value(self.reduction.body, name=True)
        k_axis = max(printer.tile.bound[t.K].axes)
        lowered, axes = f"{value.at(1)} - {self.middle.code}", value.axes | self.middle.axes | {k_axis}
        if k_axis in printer.tile.masks:
            lowered = f"tl.where({printer.tile.masks[k_axis]}, {lowered}, 0.0)"
        x = printer.statement(lowered, axes, "lowered").code
        gain, bias = ("", "") if self.gained else self.values(printer)
        weighted = printer.statement(f"{x} * {gain}", axes, "x").code if gain else x
        self.add(block, self.total, x)
        self.add(block, self.squares, f"{x} * {x}")
        for key, (name, places) in tiles.items():
            if axes | places >= set(range(self.axis + 1)):
                self.whole.add(sums[key])
            if self.gained:
                self.add(block, sums[key], f"{x} * {self.gained[key]}")
                continue
            wide = self.products.widened(printer, key, name)
            wide = wide if wide.isidentifier() else printer.statement(wide, frozenset((self.axis - 1, self.axis)), "wide").code
            self.add(block, sums[key], f"{weighted} * {wide}")
            self.add(block, self.by_gain.setdefault(key, names.new("by_gain")), f"{gain} * {wide}" if gain else wide)
            if bias:
                self.add(block, self.by_bias.setdefault(key, names.new("by_bias")), f"{bias} * {wide}")

    def add(self, block: Block, name: str, code: str) -> None:
        """Adds to a sum; where there is one step, what is added is all."""
        block.line(f"{name} {'=' if self.products.straight else '+='} {code}")

    # --------------------------------------------------------------------------------------------------------------------- end

    def finish(self, sums: Sums) -> None:
        """Makes every sum one number a column (and row), and the sums of products what they are with the norm."""
        body, names = self.products.body, self.builder.names
        beside = [] if self.gained else [*self.by_gain.values(), *self.by_bias.values()]
        self.exchange(body, together := [*sums.values(), *beside, self.total, self.squares], together)
        count = Printer(self.builder, body, Tile((), {})).integer(normalise(self.reduction.size), 3)
        mean, rstd = names.new("mean"), names.new("rstd")
        body.comment("mean and deviation, which are the same for a whole row")
        body.line(f"{mean} = {self.total} / {count}")
        body.line(f"{rstd} = tl.rsqrt({self.squares} / {count} - {mean} * {mean} + {self.reduction.eps!r})")
        for key, name in sums.items():
            term = f" + {self.by_bias[key]}" if key in self.by_bias else ""
            body.line(f"{name} = ({name} - {mean} * {self.by_gain[key]}) * {rstd}{term}")

    def exchange(self, block: Block, names: list[str], values: list[str]) -> None:
        """Adds up several values along the contracted dimension at once, which must all have the same places for that. What is the same in
        several costs no more: compilers see it."""
        helper = f"add_each_{len(values)}"
        self.builder.use(helper)
        for value in values:
            if value not in self.whole:
                block.line(f"{value} = tl.broadcast_to({value}, [{'' if self.single else 'BLOCK_M, '}BLOCK_N, BLOCK_K])")
        block.line(f"{', '.join(names)} = tl.reduce(({', '.join(values)}), {self.axis}, {helper})")
