"""The blocks of row regions."""

from __future__ import annotations

import sympy
from dsi.ir import tile as t

from .kernel import Choice
from .roofline import power_of_two, typical


def row_choice(plan: t.RowPlan) -> Choice:
    """Blocks for a row plan: whole rows where it has statistics and a row fits, else about 1,024 elements a program."""
    columns = typical(plan.columns)
    known = sympy.sympify(plan.columns).is_Integer
    if plan.reductions:
        block_n = min(power_of_two(columns), 8192) if known else 1024
    else:
        block_n = min(power_of_two(columns), 1024)
    warps = 8 if block_n > 2048 else 4
    block_m = max(1024 // block_n, 1)
    rows = sympy.sympify(plan.rows)
    if rows.is_Integer:
        block_m = min(block_m, power_of_two(int(rows)))
    return Choice("row", None, block_m, block_n, 1, 1, warps, 1)
