"""Prints tile expressions as numbered Triton statements.

A `Tile` says how the symbols of a plan are laid out: which block variable stands for each, along which axes it varies, and what masks the axes have.
A `Printer` writes the statements for values at the points of one tile, each once.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.pointwise import POINTWISE

from .builder import Block, Builder, triton_type
from .integers import ATOM, PRODUCT, RELATION, SUM, Quotient, Remainder, interval, normalise, within, write
from .pointwise import FORMS, HELPERS, is_float, literal

if TYPE_CHECKING:
    from .columns import Columns

# The subscript that lays a 1-d block variable along one axis of a tile of 0 to 3 axes.
SUBSCRIPTS = {0: (), 1: ("",), 2: ("[:, None]", "[None, :]"), 3: ("[:, None, None]", "[None, :, None]", "[None, None, :]")}
LINE = 110  # longest expression printed in one statement
INT32 = 2**31 - 1
Point = tuple[tuple[sympy.Symbol, sympy.Expr], ...]
Guard = tuple[sympy.Basic, ...]


@dataclass(frozen=True)
class Text:
    """Source of a value: the axes it varies along (none: a scalar), how strongly it binds, and the number if it is a literal."""

    code: str
    axes: frozenset[int] = frozenset()
    strength: int = ATOM
    number: float | int | bool | None = None

    def at(self, strength: int) -> str:
        return f"({self.code})" if self.strength < strength else self.code


@dataclass(frozen=True)
class Bound:
    """The block variable that stands for a symbol, and the axes it varies along."""

    code: str
    axes: frozenset[int] = frozenset()


@dataclass
class Tile:
    """The layout of a tile: source text of each axis's size; symbols; masks by axis (source text, only where needed).

    `fixed` replaces symbols before anything is printed (a dimension of size 1; a column by its position in a part). `accumulators` are the anchor's
    sums by window and part, `statistics` those of row statistics. `columns` and `part` say how the tile's columns are laid out, and `group_start` is
    the source (1-d) of where each column's group starts within the tile ("" where there is one group).
    """

    shape: tuple[str, ...]
    bound: dict[sympy.Symbol, Bound]
    masks: dict[int, str] = field(default_factory=dict)
    fixed: dict[sympy.Symbol, sympy.Expr] = field(default_factory=dict)
    limits: dict[sympy.Symbol, tuple[sympy.Expr, ...]] = field(default_factory=dict)
    accumulators: dict[tuple[int, int], Text] = field(default_factory=dict)
    statistics: dict[tuple[int, str], Text] = field(default_factory=dict)
    columns: Columns | None = None
    part: int = 0
    group_start: str = ""

    def dims(self, axes: Iterable[int]) -> str:
        wanted = set(axes)
        return "[" + ", ".join(size if axis in wanted else "1" for axis, size in enumerate(self.shape)) + "]"


class Interner:
    """Numbers structurally equal expressions alike, without walking a shared subexpression twice."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[t.Expr, int]] = {}
        self._numbers: dict[object, int] = {}
        self._symbols: dict[int, frozenset[sympy.Symbol]] = {}

    def number(self, expr: t.Expr) -> int:
        known = self._by_id.get(id(expr))
        if known is not None:
            return known[1]
        if isinstance(expr, t.Op):
            key: object = ("op", expr.name, tuple(self.number(a) for a in expr.args), expr.dtype)
        elif isinstance(expr, t.Load):
            key = (
                "load",
                expr.input,
                tuple(self.number(c) if isinstance(c, t.Expr) else sympy.sympify(c) for c in expr.coords),
                expr.dtype,
            )
        elif isinstance(expr, t.Permuted):
            key = ("permuted", self.number(expr.body), expr.symbol, expr.source)
        elif isinstance(expr, t.Const):
            key = ("const", repr(expr.value), expr.dtype)
        else:
            key = expr
        number = self._numbers.setdefault(key, len(self._numbers))
        self._by_id[id(expr)] = (expr, number)
        if number not in self._symbols:
            parts = children(expr)
            own: set[sympy.Symbol] = set()
            for part in parts:
                own |= self.symbols(part)
            if isinstance(expr, t.Load):
                own |= {s for c in expr.coords if not isinstance(c, t.Expr) for s in sympy.sympify(c).free_symbols}
            elif isinstance(expr, t.Index):
                own |= expr.expr.free_symbols
            elif isinstance(expr, t.Test):
                own |= expr.condition.free_symbols
            elif isinstance(expr, t.Permuted):
                own |= expr.source.free_symbols
            elif isinstance(expr, t.Statistic):
                own |= {t.R}
            elif isinstance(expr, t.Window):
                own |= {t.R, t.C}
            self._symbols[number] = frozenset(own)
        return number

    def symbols(self, expr: t.Expr) -> frozenset[sympy.Symbol]:
        """The symbols that an expression depends on."""
        return self._symbols[self.number(expr)]


def children(expr: t.Expr) -> tuple[t.Expr, ...]:
    """The direct subexpressions."""
    if isinstance(expr, t.Op):
        return expr.args
    if isinstance(expr, t.Load):
        return tuple(c for c in expr.coords if isinstance(c, t.Expr))
    if isinstance(expr, t.Permuted):
        return (expr.body,)
    return ()


def moved(expr: t.Permuted, point: Point) -> Point:
    """The point, over the plan's symbols, at which a permuted body is taken if the whole is taken at `point`."""
    after = {**dict(point), expr.symbol: expr.source.xreplace(dict(point))}
    return tuple(sorted(after.items(), key=lambda item: str(item[0])))


class Printer:
    """Writes statements into `block` for values over one `tile`."""

    def __init__(self, builder: Builder, block: Block, tile: Tile, parent: Printer | None = None, hoist: bool = False):
        self.builder, self.block, self.tile, self.parent, self.hoist = builder, block, tile, parent, hoist
        self.interner: Interner = parent.interner if parent else Interner()
        self.uses: Counter[int] = Counter()
        self._exposed: dict[tuple[int, Point], bool] = {}
        self.values: dict[tuple[int, Point, Guard], Text] = {}

    # ------------------------------------------------------------------------------------------------------------ structure

    def on(self, tile: Tile) -> Printer:
        """A printer into the same block for another tile."""
        return Printer(self.builder, self.block, tile, self)

    @contextmanager
    def loop(self, header: str, tile: Tile, first: Sequence[str] = ()):
        """A loop whose body prints over `tile`; what does not depend on the symbols that the tile binds anew is written before the loop."""
        body = Block(self.block)
        for line in first:
            body.line(line)
        yield Printer(self.builder, body, tile, self, hoist=True)
        self.block.attach(header, body)

    @contextmanager
    def branch(self, header: str, tile: Tile | None = None):
        """A conditional whose body prints over `tile`."""
        body = Block(self.block)
        yield Printer(self.builder, body, tile or self.tile, self)
        self.block.attach(header, body)

    def statement(self, code: str, axes: frozenset[int], hint: str) -> Text:
        """The name of `code`, written as a statement unless it already is one."""
        if code.isidentifier():
            return Text(code, axes)
        name = self.block.name_of(code)
        if name is None:
            name = self.builder.names.new(hint)
            self.block.assign(name, code)
        return Text(name, axes)

    def expect(self, roots: Iterable[t.Expr]) -> None:
        """Counts uses in what will be printed, so that a value used once can stay inside the statement that uses it."""
        seen: set[int] = set()
        stack = list(roots)
        for root in stack:
            self.uses[self.interner.number(root)] += 1
        while stack:
            expr = stack.pop()
            number = self.interner.number(expr)
            if number in seen:
                continue
            seen.add(number)
            for part in children(expr):
                self.uses[self.interner.number(part)] += 1
                stack.append(part)

    def _outer(self, symbols: Iterable[sympy.Symbol]) -> bool:
        """Whether something over `symbols` is the same in every step of this printer's loop."""
        if not self.hoist or self.parent is None:
            return False
        mine, outer = self.tile, self.parent.tile
        return all(mine.bound.get(s) == outer.bound.get(s) and mine.fixed.get(s) == outer.fixed.get(s) for s in symbols) and len(
            mine.shape
        ) == len(outer.shape)

    # ------------------------------------------------------------------------------------------------------------- integers

    def index(self, expr: sympy.Basic, point: Point = ()) -> sympy.Basic:
        """`expr` at a point, normalised under the tile's ranges."""
        expr = sympy.sympify(expr)
        if point:
            expr = expr.xreplace(dict(point))
        if self.tile.fixed:
            expr = expr.xreplace(self.tile.fixed)
        return normalise(expr, self.tile.limits)

    def axes_of(self, expr: sympy.Basic) -> frozenset[int]:
        return frozenset().union(*(self.tile.bound[s].axes for s in expr.free_symbols if s in self.tile.bound))

    def integer(self, expr: sympy.Basic, strength: int = RELATION) -> str:
        """Source of a normalised index expression or relation."""
        return write(expr, self.atom, strength)

    def atom(self, expr: sympy.Basic) -> str:
        """The name of a symbol, quotient or remainder."""
        if expr.is_Symbol:
            return self.tile.bound[expr].code if expr in self.tile.bound else self.builder.size(expr)
        if self._outer(expr.free_symbols):
            return self.parent.atom(expr)
        x, n = expr.args
        over, sign, word = (
            self.integer(x, PRODUCT),
            "//" if isinstance(expr, Quotient) else "%",
            "div" if isinstance(expr, Quotient) else "mod",
        )
        by = self.integer(n, ATOM)
        hint = f"{x}_{word}_{n}" if x.is_Symbol and n.is_Atom else f"i_{word}_{n}" if n.is_Atom else "i"
        return self.statement(f"{over} {sign} {by}", self.axes_of(expr), hint).code

    def wide(self, expr: sympy.Basic) -> str:
        """The name of an atom held in 64 bits."""
        if self._outer(expr.free_symbols):
            return self.parent.wide(expr)
        name = self.atom(expr)
        tensor = bool(expr.free_symbols & set(self.tile.bound))
        code = f"{name}.to(tl.int64)" if tensor else f"tl.cast({name}, tl.int64)"
        return self.statement(code, self.axes_of(expr), f"{name.split('[')[0]}_wide").code

    def offset(self, coords: Sequence[sympy.Expr], tensor: t.Tensor) -> tuple[list[str], frozenset[int]]:
        """Terms of the element offset of `coords` (of dimensions that are not gathered) in `tensor`, and the axes it varies along."""
        total = normalise(sum((c * s for c, s in coords), sympy.Integer(0)), self.tile.limits)
        if total == 0:
            return [], frozenset()
        wide = self.may_exceed(tensor)
        terms = []
        # Terms in the order of the axes they vary along, constants last.
        for term in sorted(
            sympy.Add.make_args(total), key=lambda x: (x.is_Integer, sorted(self.axes_of(x)) or [9], sympy.default_sort_key(x))
        ):
            _, top = interval(term, self.tile.limits)
            atoms = [a for a in sympy.Mul.make_args(term) if not a.is_number]
            if wide and atoms and (top is None or top > INT32 // 4):
                chosen = next((a for a in atoms if self.axes_of(a)), atoms[0])
                chosen = chosen if not chosen.is_Pow else chosen.base
                if not (chosen.is_Symbol or isinstance(chosen, (Quotient, Remainder))):
                    chosen = next(iter(sorted(chosen.atoms(sympy.Symbol, Quotient, Remainder), key=sympy.default_sort_key)))
                terms.append(write(term, lambda e, chosen=chosen: self.wide(e) if e == chosen else self.atom(e), PRODUCT))
            else:
                terms.append(self.integer(term, PRODUCT))
        return terms, self.axes_of(total)

    def may_exceed(self, tensor: t.Tensor) -> bool:
        """Whether an offset in the tensor may need more than 32 bits (also where its size is not known)."""
        extent = 0
        for size, stride in zip(tensor.sizes, tensor.strides, strict=True):
            size, stride = sympy.sympify(size), sympy.sympify(stride)
            if not (size.is_Integer and stride.is_Integer):
                return True
            extent += max(int(size) - 1, 0) * int(stride)
        return extent > INT32

    # --------------------------------------------------------------------------------------------------------------- values

    def value(self, expr: t.Expr, point: Point = (), guard: Guard = (), name: bool = False) -> Text:
        """Source of `expr` at a point of the tile; `guard` holds conditions, at the tile's own points, outside of which loads may lie out of bounds."""
        if guard and not self.exposed(expr, point):
            guard = ()
        key = (self.interner.number(expr), point, guard)
        known = self.values.get(key)
        if known is not None and not (name and known.strength < ATOM):
            return known
        symbols = set(self.interner.symbols(expr)).union(*(source.free_symbols for _, source in point))
        for condition in guard:
            symbols |= condition.free_symbols
        if not isinstance(expr, t.Const) and self._outer(symbols):
            text = self.parent.value(expr, point, guard, name=True)
        else:
            text = self._make(expr, point, guard)
            often = self.uses[key[0]] > 1 and isinstance(expr, (t.Op, t.Index, t.Test))
            if (text.number is None and text.strength < ATOM and (name or often or len(text.code) > LINE)) or (
                text.number is None and isinstance(expr, t.Op) and (often or name) and not text.code.isidentifier()
            ):
                text = self.statement(text.code, text.axes, "v")
        self.values[key] = text
        return text

    def _make(self, expr: t.Expr, point: Point, guard: Guard) -> Text:
        if isinstance(expr, t.Load):
            return self.load(expr, point, guard)
        if isinstance(expr, t.Const):
            code, strength = literal(expr.value)
            return Text(code, frozenset(), strength, expr.value)
        if isinstance(expr, t.Index):
            at = self.index(expr.expr, point)
            if at.is_Integer:
                return Text(str(int(at)), frozenset(), ATOM if at >= 0 else SUM, int(at))
            code = self.integer(at)
            if expr.dtype == torch.int64:
                # Sizes alone may be Python integers in the interpreter, which have no method `to`.
                code = (
                    f"({code}).to(tl.int64)" if self.axes_of(at) or at.free_symbols & set(self.tile.bound) else f"tl.cast({code}, tl.int64)"
                )
                return Text(code, self.axes_of(at))
            return Text(code, self.axes_of(at), SUM)
        if isinstance(expr, t.Test):
            at = self.index(expr.condition, point)
            if at in (sympy.true, sympy.false):
                return Text(str(bool(at)), frozenset(), ATOM, bool(at))
            return Text(self.integer(at), self.axes_of(at), RELATION)
        if isinstance(expr, t.Statistic):
            return self.tile.statistics[(expr.reduction, expr.which)]
        if isinstance(expr, t.Window):
            return self.window(expr, point)
        if isinstance(expr, t.Permuted):
            return self.value(expr.body, moved(expr, point), guard)
        assert isinstance(expr, t.Op), expr
        return self.operation(expr, point, guard)

    def window(self, expr: t.Window, point: Point) -> Text:
        """An accumulator: this part's, another part's where the point is permuted, or gathered where no part explains the permutation."""
        tile = self.tile
        column = dict(point).get(t.C)
        if column is None or column == t.C:
            return tile.accumulators[(expr.index, tile.part)]
        at = self.index(column)
        part = tile.columns.part_of(at, tile.limits)
        if part is not None:
            return tile.accumulators[(expr.index, part)]
        text = tile.accumulators[(expr.index, 0)]
        axis = max(text.axes)
        subscript = SUBSCRIPTS[len(tile.shape)][axis]
        source = self.integer(normalise(Remainder(at, tile.columns.hold), tile.limits), SUM)
        if tile.group_start:
            source = f"{self.statement(tile.group_start, frozenset((axis,)), 'group_start').code}{subscript} + {source}"
        if len(tile.shape) > 1:
            source = f"tl.broadcast_to({source}, {tile.dims(text.axes)})"
        index = self.statement(source, text.axes, "partner")
        return self.statement(f"tl.gather({text.code}, {index.code}, {axis})", text.axes, f"{text.code}_partner")

    # ---------------------------------------------------------------------------------------------------------------- loads

    def exposed(self, expr: t.Expr, point: Point) -> bool:
        """Whether some load within `expr` is not known to lie inside its tensor for every point of the tile's ranges."""
        key = (self.interner.number(expr), point)
        if key not in self._exposed:
            if isinstance(expr, t.Permuted):
                self._exposed[key] = self.exposed(expr.body, moved(expr, point))
            else:
                own = isinstance(expr, t.Load) and any(
                    not isinstance(c, t.Expr) and not within(self.index(c, point), sympy.sympify(size), self.tile.limits)
                    for c, size in zip(expr.coords, self.builder.spec.inputs[expr.input].sizes, strict=True)
                )
                self._exposed[key] = own or any(self.exposed(part, point) for part in children(expr))
        return self._exposed[key]

    def load(self, expr: t.Load, point: Point = (), guard: Guard = (), raw: bool = False, hint: str = "", policy: str = "") -> Text:
        """A load, masked where it may lie outside of the tensor; floats come as fp32 unless `raw`."""
        tensor = self.builder.spec.inputs[expr.input]
        pointer = self.builder.input(expr.input)
        address, axes, masks = self.address(pointer, tensor, expr.coords, point, guard)
        for axis in sorted(axes):
            if axis in self.tile.masks:
                masks.append(self.tile.masks[axis])
        for condition in guard:
            if self.axes_of(condition) <= axes:
                masks.append(self.integer(condition, ATOM))
        code = f"tl.load({address}"
        if masks:
            code += f", mask={conjunction(masks)}, other={'0.0' if is_float(expr.dtype) else '0'}"
        if policy:
            code += f', eviction_policy="{policy}"'
        code += ")"
        if is_float(expr.dtype) and expr.dtype != torch.float32 and not raw:
            code += ".to(tl.float32)"
        return self.statement(code, axes, hint or tensor.name or f"in{expr.input}")

    def address(self, pointer: str, tensor: t.Tensor, coords, point: Point, guard) -> tuple[str, frozenset[int], list[str]]:
        """Pointer source at coordinates, its axes, and the masks that gathered coordinates need: an index out of range must not touch memory."""
        plain, terms, axes, masks = [], [], frozenset(), []
        for coord, size, stride in zip(coords, tensor.sizes, tensor.strides, strict=True):
            size, stride = sympy.sympify(size), sympy.sympify(stride)
            if isinstance(coord, t.Expr) and not isinstance(coord, t.Index):
                text = self.value(coord, point, guard, name=True)
                inside = f"({text.at(SUM)} >= 0) & ({text.at(SUM)} < {self.integer(normalise(size), SUM)})"
                masks.append(self.statement(inside, text.axes, f"{text.code}_in").code)
                axes |= text.axes
                stride = normalise(stride)
                if stride != 0:
                    code = text.at(ATOM)
                    if self.may_exceed(tensor) and coord.dtype != torch.int64:
                        code = f"{code}.to(tl.int64)"
                    terms.append(code if stride == 1 else f"{code} * {self.integer(stride, ATOM)}")
            else:
                plain.append((self.index(coord.expr if isinstance(coord, t.Index) else coord, point), normalise(stride)))
        more, plain_axes = self.offset(plain, tensor)
        terms += more
        return (f"{pointer} + {' + '.join(terms)}" if terms else pointer), axes | plain_axes, masks

    # ----------------------------------------------------------------------------------------------------------- operations

    def operation(self, expr: t.Op, point: Point, guard: Guard) -> Text:
        """A pointwise operation on values at this point."""
        name, args = expr.name, expr.args
        if name == "where":
            condition, yes, no = args
            test = self.value(condition, point, guard)
            if test.number is not None:
                return self.value(yes if test.number else no, point, guard)
            if isinstance(condition, t.Test):
                at = self.index(condition.condition, point)
                values = [test, self.value(yes, point, (*guard, at)), self.value(no, point, (*guard, sympy.Not(at)))]
            else:
                values = [test, self.value(yes, point, guard), self.value(no, point, guard)]
        else:
            values = [self.value(arg, point, guard) for arg in args]
        axes = frozenset().union(*(v.axes for v in values))
        if name == "cast":
            return self.cast(expr, values[0])
        if name == "not":
            code = f"{values[0].at(SUM)} == 0" if expr.dtype == torch.bool else f"~{values[0].at(ATOM)}"
            return Text(code, axes, RELATION if expr.dtype == torch.bool else SUM)
        if POINTWISE[name].result == "float" and name != "div":
            values = [self._floated(v, a) for v, a in zip(values, args, strict=True)]
        if name in HELPERS or name == "pow":
            function = "power" if name == "pow" else name
            self.builder.use(function)
            return Text(f"{function}({', '.join(v.code for v in values)})", axes)
        form, strength, needed = FORMS[name]
        if values and all(v.number is not None for v in values):
            values = [Text(f"tl.cast({values[0].code}, {compute_type(args[0].dtype)})"), *values[1:]]
        parts = [v.at(s) for v, s in zip(values, needed, strict=True)]
        if sum(len(p) for p in parts) > LINE:
            parts = [
                (v if v.number is not None or v.code.isidentifier() else self.statement(v.code, v.axes, "v")).at(s)
                for v, s in zip(values, needed, strict=True)
            ]
        return Text(form.format(*parts), axes, strength)

    def _floated(self, text: Text, expr: t.Expr) -> Text:
        if text.number is not None:
            code, strength = literal(float(text.number))
            return Text(f"tl.cast({code}, tl.float32)", frozenset(), ATOM) if strength <= ATOM else text
        return text if is_float(expr.dtype) else Text(f"{text.at(ATOM)}.to(tl.float32)", text.axes)

    def cast(self, expr: t.Op, text: Text) -> Text:
        """A conversion: rounding to a narrower float and back to fp32, or between kinds."""
        (arg,) = expr.args
        source, target = arg.dtype, expr.dtype
        name = triton_type(target)
        if text.number is not None:
            number = torch.tensor(text.number, dtype=source).to(target).item()
            code, strength = literal(number)
            return Text(code, frozenset(), strength, number)
        if target == torch.bool:
            return text if source == torch.bool else Text(f"{text.at(SUM)} != 0", text.axes, RELATION)
        if not is_float(target):
            return text if source == target else Text(f"{text.at(ATOM)}.to({name})", text.axes)
        code = text.at(ATOM) if is_float(source) else f"{text.at(ATOM)}.to(tl.float32)"
        if target == torch.float32 or exact(arg, target):
            return text if is_float(source) else Text(code, text.axes)
        return Text(f"{code}.to({name}).to(tl.float32)", text.axes)

    # --------------------------------------------------------------------------------------------------------------- stores

    def store(self, store: t.Store) -> None:
        """One store at every point of the tile that its masks leave."""
        tensor = self.builder.spec.outputs[store.output]
        pointer = self.builder.output(store.output)
        address, axes, masks = self.address(pointer, tensor, store.coords, (), ())
        text = self.value(store.value)
        masks = [self.tile.masks[axis] for axis in sorted(self.tile.masks)] + masks
        masked = frozenset(self.tile.masks)
        if not (text.axes | masked) <= axes:
            address = f"tl.broadcast_to({address}, {self.tile.dims(axes | text.axes | masked)})"
        code = text.code
        if text.number is None and (store.dtype != store.value.dtype or (is_float(store.dtype) and store.dtype != torch.float32)):
            code = f"{text.at(ATOM)}.to({triton_type(store.dtype)})" if store.dtype != torch.bool else f"{text.at(SUM)} != 0"
        if len(code) > 40:
            code = self.statement(code, text.axes, tensor.name or f"out{store.output}").code
        if len(address) > 80 and address.startswith(f"{pointer} + "):
            address = f"{pointer} + {self.statement(address.removeprefix(f'{pointer} + '), axes, 'at').code}"
        self.block.line(f"tl.store({address}, {code}{f', mask={conjunction(masks)}' if masks else ''})")


def conjunction(masks: Sequence[str]) -> str:
    """All of the masks, each once."""
    return " & ".join(m if re.fullmatch(r"\w+(\[[:, None]*\])?|\(.*\)", m) else f"({m})" for m in dict.fromkeys(masks))


def compute_type(dtype: torch.dtype) -> str:
    """The type in which a kernel holds values of a dtype."""
    return "tl.float32" if is_float(dtype) else triton_type(dtype)


def exact(expr: t.Expr, dtype: torch.dtype) -> bool:
    """Whether an expression's value is already one of `dtype`, so that rounding to it changes nothing."""
    if isinstance(expr, t.Load):
        return expr.dtype == dtype
    return isinstance(expr, t.Op) and expr.name == "cast" and expr.dtype == dtype
