"""What decode attention asks the memory for before it waits for the kernels before it: its first keys and values.

A request reads nothing: what a kernel before this one still writes there, the loads behind the wait will find.
"""

from __future__ import annotations

import math

import torch
from dsi.ir import tile as t

from .attention_scan import rows_of_mask
from .attention_tiles import AttentionTiles, Channels
from .builder import Block, prefetch
from .printer import Printer, conjunction

LINE = 128  # bytes that one prefetch asks for


def ask(kernel: AttentionTiles, block: Block, keys: str) -> int:
    """Writes requests for some keys and their values, and returns how many there are."""
    builder, choice, plan = kernel.builder, kernel.choice, kernel.plan
    j, line = builder.names.new("j_ahead"), builder.names.new("line")
    block.line(f"{j} = {keys}")
    block.line(f"{builder.names.new(f'{j}_in')} = {j} < {kernel.size(kernel.keys)}")
    if choice.hint and not _hinted(kernel, block, j):
        return 0
    asked = 0
    for operand, symbol, size in ((plan.k, t.D, plan.head_size), (plan.v, t.E, plan.value_size)):
        if not isinstance(operand, t.Load) or any(isinstance(coord, t.Expr) for coord in operand.coords):
            continue  # its place is known behind the wait only
        step = LINE // operand.dtype.itemsize
        lines = 1 << (math.ceil(min(size, max(choice.prefetch // operand.dtype.itemsize, 1)) / step) - 1).bit_length()
        name = f"{line}_{asked}" if asked else line
        block.line(f"{name} = tl.arange(0, {lines}) * {step}")
        block.line(f"{name}_in = {name} < {size}")
        tile = kernel.tile("j", Channels(symbol, name, str(lines), 0, 0, 1), names={"j": j}, masked={"j": True})
        pointer = builder.input(operand.input)
        printer = Printer(builder, block, tile)
        address, axes, _ = printer.address(pointer, kernel.spec.inputs[operand.input], operand.coords, (), ())
        if axes == frozenset((0, 1)):  # else it repeats itself, and is small
            block.line(prefetch(f"tl.where({conjunction(list(tile.masks.values()))}, {address}, {pointer})"))
            asked += 1
    return asked


def _hinted(kernel: AttentionTiles, block: Block, j: str) -> bool:
    """Leaves of the keys that are asked for ahead those that a mask which is the same for all rows shows, as it lies in memory. A
    kernel before this one may be writing it: past the L1 cache, so that the loads behind the wait do not find what is read here. False
    where the mask is computed from what such a kernel may be writing, so that which keys are worth asking for is not known."""
    mask, builder = kernel.plan.mask, kernel.builder
    if mask is None or mask.dtype != torch.bool or rows_of_mask(kernel.plan, kernel.queries == 1) != "":
        return True
    tile = kernel.tile("j", names={"j": j}, masked={"j": True})
    if not isinstance(mask, t.Load):
        if any(isinstance(part, t.Load) and part.input not in kernel.spec.constants for part in t.parts_of(mask)):
            return False
        block.comment("of the keys that the mask shows: nothing in the graph writes what it is computed from")
        printer = Printer(builder, block, tile)
        printer.expect([mask])
        block.line(f"{j}_in = {j}_in & {printer.value(mask).at(3)}")
        return True
    if any(isinstance(coord, t.Expr) for coord in mask.coords):
        return True
    pointer = builder.input(mask.input)
    address, axes, _ = Printer(builder, block, tile).address(pointer, kernel.spec.inputs[mask.input], mask.coords, (), ())
    if axes == frozenset((0,)):
        block.comment("by the mask of the step before, if need be: nothing is computed from it")
        block.line(f'{j}_in = tl.load({address}, mask={j}_in, other=0, cache_modifier=".cg")')
    return True
