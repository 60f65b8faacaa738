"""The first step of `skinny` out of its loop: what is loaded before the loop, and how it is multiplied behind the loop or in its first
turn.

The weights are asked for before the kernel waits for the one before it (products.ahead), the rows right behind the wait. Triton would store
these tiles to shared memory, where products take them from, as soon as they are loaded: the kernel would then wait for memory before it has
asked for anything else. So they stay in registers until they are multiplied (pointwise.HELPERS: `late`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .builder import Block
from .deferred import unconditional

if TYPE_CHECKING:
    from .linear import Bases
    from .products import Products, Sums


def first_rows(products: Products, statistics: Bases) -> None:
    """Asks for the rows of the step."""
    printer = products.x_printer = products.step_printer(products.outer(statistics), statistics)
    printer.expect([products.x])
    for load in unconditional([products.x]) if products.digits is None else products.digits.loads:
        text = printer.load(load, raw=True)  # converted where it is used, so that no one waits for it here
        products.first_x[text.code] = load.dtype


def first_step(products: Products, block: Block, sums: Sums) -> None:
    """Writes the step into `block`."""
    printer, builder = products.x_printer, products.builder
    assert printer is not None
    loop, (products.k0, products.current) = (products.k0, products.current), ("", products.k)
    block.comment("the first step, whose tiles were loaded before the wait")

    def late(name: str, dtype: torch.dtype) -> str:
        if dtype.itemsize >= 4 or dtype == torch.bool:  # of bools, which a register holds one each, LLVM aborts
            return name
        builder.use("late")
        found = builder.names.new(f"{name}_held")  # a name of its own, or the loop would carry it from turn to turn
        block.line(f"{found} = late({name}, {4 // dtype.itemsize}, PDL)")
        return found

    dtypes = [products.spec.inputs[window.weight].dtype for window in products.segment.windows]
    tiles = {key: (late(name, dtypes[key[0]]), axes) for key, (name, axes) in products.first.items()}
    for name, dtype in products.first_x.items():
        block.rename(name, late(name, dtype))
    printer.block = block
    products.matrix_step(printer, products.k, sums, tiles)
    products.k0, products.current = loop
