"""Rows of a product that are given as int8: what of them meets the weights, and the sums of integers that become one in the end.

They are whole numbers (W8A8), or two digits a row (codegen/quantised.py): two operands and two sums, or where there are many rows one
operand with the high digits of a block's rows in front of the low ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy
import torch
from dsi.ir import tile as t

from .builder import Block
from .integers import normalise
from .printer import Printer, Tile

if TYPE_CHECKING:
    from .apart import Given
    from .products import Products

Key = tuple[int, int]  # of a sum: window and part


class Digits:
    """The digits of one set of columns' products. `given`: where they are."""

    def __init__(self, products: Products, given: Given):
        self.products, self.given = products, given
        self.linear, self.builder, self.body = products.linear, products.builder, products.body
        self.sums: dict[Key, list[str]] = {}  # names of the sums that are integers to the end, a digit each: those of a scale a row
        self.loads = [t.Load(number, (t.R, t.K), torch.int8) for number in given.inputs]
        self._rows = ""  # names the rows of the operand that holds both

    def name_rows(self) -> None:
        """Names the rows of the operand that holds both digits, where one does."""
        if not self.given.beside:
            return
        self._rows = self.builder.names.new("r_digits")
        each = "tl.arange(0, 2 * BLOCK_M)"
        first = "" if self.linear.one_block else f"tl.program_id({self.linear.row_axis}) * BLOCK_M + "
        self.body.line(f"{self._rows} = ({first}{each} % BLOCK_M) * 2 + {each} // BLOCK_M")
        if self.linear.row_mask:
            self.builder.names.new(f"{self._rows}_in")
            size = Printer(self.builder, self.body, Tile((), {})).integer(normalise(2 * sympy.sympify(self.linear.plan.rows)), 1)
            self.body.line(f"{self._rows}_in = {self._rows} < {size}")

    def zeros(self, key: Key, name: str, shape: str) -> None:
        """Writes the sums of integers that become the sum `name`, all zero."""
        self.sums[key] = [self.builder.names.new(f"{name}_{digit}") for digit in self.given.names]
        for digit in self.sums[key]:
            self.body.line(f"{digit} = tl.zeros({'[BLOCK_N, 2 * BLOCK_M]' if self.given.beside else shape}, tl.int32)")

    def operands(self, printer: Printer, block: Block, k: str) -> list[str]:
        """The digits of the rows at step `k`, whose rows `printer` prints over."""
        if self.given.beside:
            printer = self._both(block, k)
        return [printer.load(load, raw=True).code for load in self.loads]

    def _both(self, block: Block, k: str) -> Printer:
        """What prints the operand that holds both digits."""
        tile = self.linear.tile("rk", {"r": self._rows, "k": k}, ("k",) if self.products.mask_needed() else ())
        tile.shape = ("2 * BLOCK_M", "BLOCK_K")
        tile.limits[t.R] = tuple(2 * limit for limit in tile.limits[t.R])
        return Printer(self.builder, block, tile, Printer(self.builder, self.body, self.linear.tile_without(tile)))

    def finish(self, names: dict[Key, str], along: int | None) -> None:
        """Writes each sum `names[key]` in fp32; `along`: the axis along which its integers are still to be summed."""
        for key, digits in self.sums.items():
            if self.given.beside:
                (both,), digits = digits, [self.builder.names.new(f"{names[key]}_{digit}") for digit in ("high", "low")]
                apart = f"tl.permute(tl.reshape({both}, [BLOCK_N, 2, BLOCK_M]), (0, 2, 1))"
                self.body.line(f"{', '.join(digits)} = tl.split({apart})")
            for digit in digits if along is not None else ():  # whole numbers as long as possible: they need no conversion, and are exact
                self.body.line(f"{digit} = tl.sum({digit}, {along})")
            self.body.line(f"{names[key]} = {joined(digits)}")


def joined(digits: list[str]) -> str:
    """Sums of digits, the high ones first, as one in fp32."""
    wide = [f"{digit}.to(tl.float32)" for digit in digits]
    return wide[0] if len(wide) == 1 else f"({wide[0]} * 256.0 + {wide[1]})"
