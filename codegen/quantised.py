"""int8 weights in the products of linear regions: how they meet the rows, and where their scales come in.

A scale for a whole row multiplies the finished sum. A scale for some elements of a row multiplies the product of one step, where a step
lies within a group; else the weights themselves, in fp32.

Rows meet int8 weights in one of three ways. The weights are converted to the rows' dtype, which holds them exactly. Or the rows are
written in two int8 *digits*, x = unit * (256 * high + low) with a unit a row, about 16 bits: then integer units multiply the weights as
they are, and no weight is ever converted; of many rows both digits are one operand. Or, where the plan says so (W8A8), each row is
rounded to int8. Rows become int8 apart (codegen/apart.py).

Few rows meet digits without the matrix units, four elements a word (codegen/words.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import sympy
import torch
from dsi.ir import tile as t

from .builder import Block, triton_type
from .printer import Printer
from .words import LONGEST, as_words

if TYPE_CHECKING:
    from .kernel import Choice
    from .linear import Bases, Linear
    from .products import Products, Sums, Tiles

LEAST_INT8 = 32  # contracted elements of a step that the matrix units multiply as int8, at least
MANY_ROWS = 64  # rows of a tile from which on their digits lie beside each other
TWO_DIGITS = 32639.0  # the largest value whose two digits fit int8: 127 * 256 + 127
# 1.5 * 2**23: added and taken away again, it leaves the nearest integer, ties to even, of a value below 2**22.
TO_NEAREST = "12582912.0"
LEAST_STEP = "1.1754943508222875e-38"  # of two digits: the smallest normal number of fp32


def within_step(scale: t.Scale, block_k: int) -> bool:
    """Whether all elements of a step share one scale (a row's, or a group's)."""
    return not scale.group or scale.group % block_k == 0


def step_scale(products: Products, block: Block, window: t.WeightWindow, part: int, start: str) -> str:
    """The scales of one step that begins at element `start`, one a column: [columns, 1] beside skinny's and gemv's tiles, else [1,
    columns]."""
    assert window.scale is not None
    return _scales(products, block, window.scale, part, start, 1)


def _scales(products: Products, block: Block, scale: t.Scale, part: int, start: str, count: int) -> str:
    """The scales of `count` groups from element `start` on."""
    linear, names = products.linear, products.builder.names
    k = names.new("k_group")
    block.line(f"{k} = {start or '0'} + tl.arange(0, {count}) * {scale.group}")
    masks = ["c"] if products.masked else []
    if products.mask_needed():
        names.new(f"{k}_in")
        block.line(f"{k}_in = {k} < {products.size()}")
        masks.append("k")
    layout = "kc" if products.schedule == "tiled" else "ck"
    tile = linear.part(linear.tile(layout, {"c": products.c, "k": k}, tuple(masks)), products.columns, part)
    tile.shape = (str(count), "BLOCK_N") if layout == "kc" else ("BLOCK_N", str(count))
    dtype = products.spec.inputs[scale.input].dtype
    return Printer(products.builder, block, tile).load(t.Load(scale.input, scale.coords, dtype)).code


def scaled(products: Products, block: Block, right: Printer, window: t.WeightWindow, part: int, w: str, start: str) -> str:
    """A tile of int8 weights in fp32, each times the scale of its group."""
    assert window.scale is not None
    group, block_k = window.scale.group, products.choice.block_k
    wide = f"{w}.to(tl.float32)"
    if group % block_k == 0:
        s = step_scale(products, block, window, part, start)
        return f"{wide} * {s}" if len(right.tile.shape) == 2 else f"{wide} * {s}[None, :, :]"
    if block_k % group == 0 and products.schedule != "tiled":
        s = _scales(products, block, window.scale, part, start, block_k // group)
        rows, lead = ("", "") if len(right.tile.shape) == 2 else ("1, ", "None, ")
        apart, together = f"[{rows}BLOCK_N, {block_k // group}, {group}]", f"[{rows}BLOCK_N, BLOCK_K]"
        return f"tl.reshape(tl.reshape({wide}, {apart}) * {s}[{lead}:, :, None], {together})"
    dtype = products.spec.inputs[window.scale.input].dtype
    return f"{wide} * {right.load(t.Load(window.scale.input, window.scale.coords, dtype)).code}"


def word_step(products: Products, printer: Printer, tiles: Tiles, sums: Sums) -> None:
    """One step of products of words."""
    digits, block = products.digits, printer.block
    assert digits is not None
    products.builder.use("dot16")
    products.builder.constants["DP4A"] = True
    left = [printer.load(t.Load(number, (t.R, t.K), torch.int32), raw=True).code for number in digits.given.inputs]
    for (number, part), (w, _) in tiles.items():
        whole = digits.sums.get((number, part))
        if whole is not None:
            for digit, rows in zip(whole, left, strict=True):
                block.line(f"{digit} = dot16({w}, {rows}, {digit}, DP4A)")
            continue
        parts = [f"dot16({w}, {rows}, 0, DP4A)" for rows in left]
        product = parts[0] if len(parts) == 1 else f"({parts[0]} * 256 + {parts[1]})"
        block.line(f"{sums[(number, part)]} += {product}.to(tl.float32) * {_word_scale(products, block, number, part)}")


def _word_scale(products: Products, block: Block, number: int, part: int) -> str:
    """The scales of a window's tile of words: of a step, where it lies within a group, else of four words each."""
    linear, window = products.linear, products.segment.windows[number]
    scale = window.scale
    assert scale is not None
    if within_step(scale, products.choice.block_k):
        one = step_scale(products, block, window, part, products.step_start())
        return one if linear.single else f"{one}[None, :, :]"
    k = products.builder.names.new("k_fourth")
    block.line(f"{k} = {products.step_start()} + tl.arange(0, BLOCK_K // 4) * 4")
    masks = ["c"] if products.masked else []
    if products.mask_needed():
        products.builder.names.new(f"{k}_in")
        block.line(f"{k}_in = {k} < {products.size()}")
        masks.append("k")
    tile = linear.part(linear.tile("rck", {"c": products.c, "k": k}, tuple(masks)), products.columns, part)
    tile.shape = (*tile.shape[:-1], "BLOCK_K // 4")
    dtype = products.spec.inputs[scale.input].dtype
    return Printer(products.builder, block, tile).load(t.Load(scale.input, scale.coords, dtype)).code


def int8_rows(spec: t.KernelSpec, choice: Choice) -> bool:
    """Whether rows meet the weights as int8: as words, or on the matrix units, where every weight is int8 and a step has one scale a
    column; and where integers hold the sum over a whole row."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    if choice.schedule == "gemv":
        return as_words(spec, choice)
    if choice.schedule not in ("skinny", "tiled") or choice.block_k < LEAST_INT8 or not (choice.digits or plan.activations):
        return False
    scales = [window.scale for segment in plan.segments for window in segment.windows]
    short = sympy.sympify(plan.inner).is_Integer and int(plan.inner) < LONGEST
    return all(scale is not None and within_step(scale, choice.block_k) and (short or scale.group) for scale in scales)


def digits_beside(spec: t.KernelSpec, choice: Choice) -> bool:
    """Whether the two digits of the rows are one operand of twice their number. Then one product a step multiplies both, and it reads the
    weights from shared memory once, which is as slow as multiplying where there are `MANY_ROWS`."""
    plan = spec.plan
    assert isinstance(plan, t.LinearPlan)
    if choice.schedule != "skinny" or choice.block_m < MANY_ROWS or choice.peel or plan.activations or not int8_rows(spec, choice):
        return False
    return not any(window.scale and window.scale.group for segment in plan.segments for window in segment.windows)


def row_step(linear: Linear, bases: Bases, largest: float) -> str:
    """Writes the pass over the rows that finds the step of each, absmax / `largest`. Returns its name: a scalar for a single row, else 1-d
    over the rows. A row that is not finite has a step that is none."""
    plan, names, block = linear.plan, linear.builder.names, linear.block
    linear.builder.constant("BLOCK_S", linear.choice.block_s)
    block.comment(f"the step of each row: its largest value is {largest:g} of them")
    most, poison, step = names.new("most"), names.new("poison"), names.new("step")
    shape, axis = ("[BLOCK_S]", 0) if linear.single else ("[BLOCK_M, BLOCK_S]", 1)
    for name in (most, poison):
        block.line(f"{name} = tl.zeros({shape}, tl.float32)")
    with linear.steps(bases) as printer:
        printer.expect([plan.x])
        value = printer.value(plan.x, name=True)
        k_axis = max(printer.tile.bound[t.K].axes)
        code = value.code
        if k_axis in printer.tile.masks:
            code = f"tl.where({printer.tile.masks[k_axis]}, {code}, 0.0)"
        if plan.x_dtype != torch.float32:
            code = f"{code}.to({triton_type(plan.x_dtype)}).to(tl.float32)"
        x = printer.statement(code, value.axes, "x").code
        printer.block.line(f"{most} = tl.maximum({most}, tl.abs({x}))")
        printer.block.line(f"{poison} += {x} * 0.0")
    absmax, more = f"tl.max({most}, {axis})", f"tl.sum({poison}, {axis})"
    if largest == TWO_DIGITS:  # its inverse is finite: what is below half of that is as good as 0
        block.line(f"{step} = tl.maximum({absmax} / {largest}, {LEAST_STEP}) + {more}")
    else:
        block.line(f"{step} = tl.div_rn({absmax}, {largest}) + {more}")
    return step


def rounded_rows(printer: Printer, x: str, step: str) -> str:
    """A block of fp32 rows in steps of each row, as whole fp32 numbers, ties to even: the operator's own, to the last code.

    Half of a row's largest value lies half way between two codes, so that one code, a whole step, would hang on the last place of a quicker
    quotient than IEEE's.
    """
    name = printer.builder.names.new("whole")
    printer.block.line(f"{name} = tl.div_rn({x}, tl.where({step} > 0.0, {step}, 1.0))")
    printer.block.line(f"{name} = ({name} + {TO_NEAREST}) - {TO_NEAREST}")
    return name
