"""The prologue of a linear region as a kernel of its own.

Where many programs share the rows, each would compute the prologue again: a norm, a sum, a rounding, and with int8 weights the digits of
the rows. Apart, one program a row computes it once into scratch memory, and the product reads plain rows. That costs the time between
two kernels, which a tuner weighs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import sympy
import torch
from dsi.ir import tile as t

from .builder import Builder, triton_type
from .columns import ceil_div
from .deferred import constant, unconditional
from .kernel import Choice
from .layout import Text
from .linear import Grid, Linear
from .printer import Printer
from .quantised import TO_NEAREST, TWO_DIGITS, digits_beside, int8_rows, rounded_rows, row_step
from .roofline import power_of_two
from .words import WORD, as_words, in_words

WIDEST = 16384  # elements of a row that are held at once
KEPT = 64  # values that a thread keeps from one pass over its row to the next


@dataclass(frozen=True)
class Given:
    """What the product reads of the rows: a tensor of x's dtype, or int8 digits (highest first) and the unit of each row."""

    inputs: tuple[int, ...]  # numbers in the product's specification
    unit: int | None = None
    words: frozenset[int] = frozenset()  # inputs that the product reads as words: digits, and the weights
    beside: bool = False  # both digits of a row are rows of one tensor, one after the other

    @property
    def names(self) -> tuple[str, ...]:
        """What the inputs are called in the product's kernel."""
        return ("rows",) if self.unit is None else ("digits",) if self.beside else ("high", "low") if len(self.inputs) == 2 else ("whole",)


def is_apart(spec: t.KernelSpec, choice: Choice) -> bool:
    """Whether a choice computes the prologue apart: where it says so, and where rows meet the weights as int8."""
    if not isinstance(spec.plan, t.LinearPlan):
        return False
    return int8_rows(spec, choice) or (choice.apart and not isinstance(spec.plan.x, t.Load))


def product_spec(spec: t.KernelSpec, choice: Choice) -> tuple[t.KernelSpec, Choice, Given]:
    """The specification of the product alone, whose further inputs are what the rows' kernel leaves, and the choice for it. Where int8 is
    read as words, both count words along the contracted dimension."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    rows, inner, first = sympy.sympify(plan.rows), sympy.sympify(plan.inner), len(spec.inputs)
    if int8_rows(spec, choice):
        beside = digits_beside(spec, choice)
        names = ("digits",) if beside else ("high", "low") if not plan.activations else ("whole",)
        lines = 2 * rows if beside else rows
        added = [t.Tensor(name, (lines, inner), (inner, sympy.Integer(1)), torch.int8) for name in names]
        added.append(t.Tensor("unit", (rows,), (sympy.Integer(1),), torch.float32))
        given = Given(tuple(range(first, first + len(names))), first + len(names), beside=beside)
        plan = replace(plan, activations="")
    else:
        added = [t.Tensor("rows", (rows, inner), (inner, sympy.Integer(1)), plan.x_dtype)]
        given = Given((first,))
    x = t.Load(first, (t.R, t.K), added[0].dtype)
    plan = replace(plan, x=x, reductions=(), row_stores=())
    product = replace(spec, plan=plan, inputs=[*spec.inputs, *added])
    if not as_words(spec, choice):
        return product, choice, given
    read = frozenset((*given.inputs, *(window.weight for segment in plan.segments for window in segment.windows)))
    return in_words(product, read), replace(choice, block_k=choice.block_k // WORD), replace(given, words=read)


def place(builder: Builder, spec: t.KernelSpec, given: Given) -> list[str]:
    """Enters the scratch memory of what is `given` in a kernel's signature, first of all; returns the pointers."""
    numbers = (*given.inputs, *(() if given.unit is None else (given.unit,)))
    pointers = []
    for number in numbers:
        tensor = spec.inputs[number]
        size, dtype = sympy.Mul(*tensor.sizes), str(tensor.dtype).removeprefix("torch.")
        if number in given.words:
            size, dtype = size * WORD, "int8"
        pointers.append(builder.workspace(tensor.name, size, dtype))
        builder.place(number, pointers[-1])
    return pointers


def write_rows(spec: t.KernelSpec, choice: Choice, product: t.KernelSpec, given: Given) -> tuple[Builder, Grid, int]:
    """Writes the kernel of the rows; returns its builder, its grid and its number of warps."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    block = min(power_of_two(int(plan.inner)), WIDEST)
    warps = 16 if block > 4096 else 8 if block > 1024 else 4
    linear = Linear(spec, Choice("rows", choice.max_rows, 1, 16, block_s=block, num_warps=warps))
    builder, body = linear.builder, linear.builder.body
    builder.names.new("r")
    pointers = place(builder, product, given)
    builder.constant("BLOCK_M", 1)
    builder.constant("BLOCK_S", block)
    builder.start(body)
    body.line("r = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)")
    roots = [plan.x, *(reduction.body for reduction in plan.reductions)]
    linear.kept = block // (32 * warps) * len({load.input for load in unconditional(roots)}) <= KEPT
    if linear.kept and block >= int(plan.inner):
        # Constants come from memory, and what the kernel before wrote from the cache: not one after the other.
        with linear.steps({}) as printer:
            for load in unconditional(roots):
                if constant(load, spec.constants):
                    printer.value(load)
    builder.wait(body)
    statistics = linear.row_norms(body)
    step = ""
    if given.unit is not None:
        two = given.beside or len(given.inputs) == 2
        step = row_step(linear, statistics, TWO_DIGITS if two else 127.0)
        body.line(f"tl.store({pointers[-1]} + r, {step})")
        inverse = builder.names.new("inverse") if two else ""
        if two:
            body.line(f"{inverse} = 1.0 / {step}")
    with linear.steps(statistics) as printer:
        printer.expect([*(store.value for store in plan.row_stores), plan.x])
        for store in plan.row_stores:
            printer.store(store)
        x = printer.value(plan.x, name=True)
        rounded = f"{x.at(3)}.to({triton_type(plan.x_dtype)})" if plan.x_dtype != torch.float32 else x.code
        line = 2 * sympy.sympify(plan.inner) if given.beside else plan.inner
        at = f"r[:, None].to(tl.int64) * {line} + {printer.tile.bound[t.K].code}"
        mask = f", mask={printer.tile.masks[1]}" if 1 in printer.tile.masks else ""

        def keep(pointer: str, code: str) -> None:
            if x.axes != frozenset((0, 1)):
                code = f"tl.broadcast_to({code}, [BLOCK_M, BLOCK_S])"
            printer.block.line(f"tl.store({pointer} + {at}, {code}{mask})")

        if not step:
            keep(pointers[0], rounded)
        else:
            wide = rounded if plan.x_dtype == torch.float32 else f"{rounded}.to(tl.float32)"
            places = [pointers[0], f"{pointers[0]} + {plan.inner}"] if given.beside else pointers[:-1]
            if inverse:
                store_digits(printer, Text(wide, x.axes, 3), inverse, places, keep)
            else:
                keep(places[0], f"{rounded_rows(printer, wide, f'{step}[:, None]')}.to(tl.int8)")
    return builder, (ceil_div(plan.rows, 1),), warps


def store_digits(printer: Printer, x: Text, inverse: str, pointers: list[str], keep: Callable[[str, str], None]) -> None:
    """Stores rows in steps of 1 / `inverse` as two digits, 256 * high + low.

    Dividing, rounding and converting by instructions for that took more of some kernels than reading and writing: here the bits of the sum
    with `TO_NEAREST` end in those of the nearest integer.
    """
    whole = printer.builder.names.new("whole")
    printer.block.line(f"{whole} = ({x.at(2)} * {inverse}[:, None] + {TO_NEAREST}).to(tl.int32, bitcast=True)")
    keep(pointers[0], f"(({whole} + 128) >> 8).to(tl.int8)")
    keep(pointers[1], f"{whole}.to(tl.int8)")
