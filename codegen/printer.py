"""Prints tile expressions as numbered Triton statements: values at the points of one tile, loads and stores with their masks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import sympy
import torch
from dsi.ir import tile as t
from dsi.ir.pointwise import POINTWISE

from .builder import triton_type
from .indices import IndexPrinter
from .integers import ATOM, RELATION, SUM, Remainder, normalise, within
from .layout import SUBSCRIPTS, Bound, Guard, Point, Text, Tile, moved
from .pointwise import FORMS, HELPERS, is_float, literal

__all__ = ["SUBSCRIPTS", "Bound", "Printer", "Text", "Tile", "conjunction", "unrounded"]

LINE = 110  # longest expression printed in one statement


class Printer(IndexPrinter):
    """Writes statements into `block` for values over one `tile`."""

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
            for part in t.children(expr):
                self.uses[self.interner.number(part)] += 1
                stack.append(part)

    # --------------------------------------------------------------------------------------------------------------- values

    def value(self, expr: t.Expr, point: Point = (), guard: Guard = (), name: bool = False) -> Text:
        """Source of `expr` at a point of the tile; `guard` holds conditions, at the tile's own points, outside of which loads may lie out
        of bounds. `name`: as a variable, which a float that is one number throughout is, too: Triton broadcasts and sums tensors only."""
        text = self._value(expr, point, guard, name)
        if name and text.number is not None and is_float(expr.dtype):
            return self.statement(f"tl.cast({text.code}, tl.float32)", frozenset(), "v")
        return text

    def _value(self, expr: t.Expr, point: Point = (), guard: Guard = (), name: bool = False) -> Text:
        if guard and not self.exposed(expr, point):
            guard = ()
        key = (self.interner.number(expr), point, guard)
        known = self.values.get(key)
        if known is not None and not (name and known.strength < ATOM):
            return known
        symbols = set(self.interner.symbols(expr)).union(*(source.free_symbols for _, source in point))
        for condition in guard:
            symbols |= condition.free_symbols
        outer = None if isinstance(expr, t.Const) else self._outer(symbols)
        if outer is not None:
            text = outer._value(expr, point, guard, name=True)
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
            if expr.dtype == torch.int64:
                # Sizes alone may be Python integers, which have no method `to`.
                tensor = bool(at.free_symbols & set(self.tile.bound))
                return Text(
                    f"{self.integer(at, ATOM)}.to(tl.int64)" if tensor else f"tl.cast({self.integer(at)}, tl.int64)", self.axes_of(at)
                )
            return Text(self.integer(at), self.axes_of(at), SUM)
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
        assert tile.columns is not None
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
        if axis in tile.masks:  # columns that pad a group have partners that the block may not have
            source = f"tl.where({tile.masks[axis]}, {source}, 0)"
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
                self._exposed[key] = own or any(self.exposed(part, point) for part in t.children(expr))
        return self._exposed[key]

    def load(self, expr: t.Load, point: Point = (), guard: Guard = (), raw: bool = False, hint: str = "", policy: str = "") -> Text:
        """A load, masked where it may lie outside of the tensor; floats come as fp32 unless `raw`."""
        tensor = self.builder.spec.inputs[expr.input]
        pointer = self.builder.input(expr.input)
        address, axes, masks = self.address(pointer, tensor, expr.coords, point, guard)
        inside = conjunction(masks) if masks and is_float(expr.dtype) else ""
        if axes and axes == self.tile.thin and expr.dtype.itemsize == 2:
            axes = frozenset(range(len(self.tile.shape)))
            address = f"tl.broadcast_to({address}, {self.tile.dims(axes)})"
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
            code = f"{self.block.name_of(code) or code}.to(tl.float32)"
        if inside:  # eager raises; a row of zeros would go unnoticed
            narrow = raw and expr.dtype != torch.float32
            loaded = self.statement(code, axes, hint or tensor.name or f"in{expr.input}").code if narrow else code
            code = f'tl.where({inside}, {loaded}, float("nan"))' + (f".to({triton_type(expr.dtype)})" if narrow else "")
        return self.statement(code, axes, hint or tensor.name or f"in{expr.input}")

    def address(self, pointer: str, tensor: t.Tensor, coords, point: Point, guard) -> tuple[str, frozenset[int], list[str]]:
        """Pointer source at coordinates, its axes, and the masks that gathered coordinates need: an index out of range must not touch
        memory."""
        plain: list[tuple[sympy.Expr, sympy.Expr]] = []
        terms: list[str] = []
        masks: list[str] = []
        axes: frozenset[int] = frozenset()
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
        value = unrounded(store.value, store.dtype)
        text = self.value(value)
        masks = [self.tile.masks[axis] for axis in sorted(self.tile.masks)] + masks
        masked = frozenset(self.tile.masks)
        if not (text.axes | masked) <= axes:
            address = f"tl.broadcast_to({address}, {self.tile.dims(axes | text.axes | masked)})"
        code = text.code
        if text.number is None and (store.dtype != value.dtype or (is_float(store.dtype) and store.dtype != torch.float32)):
            code = f"{text.at(ATOM)}.to({triton_type(store.dtype)})" if store.dtype != torch.bool else f"{text.at(SUM)} != 0"
        if len(code) > 40:
            code = self.statement(code, text.axes, tensor.name or f"out{store.output}").code
        if len(address) > 80 and address.startswith(f"{pointer} + "):
            address = f"{pointer} + {self.statement(address.removeprefix(f'{pointer} + '), axes, 'at').code}"
        self.block.line(f"tl.store({address}, {code}{f', mask={conjunction(masks)}' if masks else ''})")


def conjunction(masks: Sequence[str]) -> str:
    """All of the masks, each once."""
    return " & ".join(m if re.fullmatch(r"\w+(\[[:, None]*\])?|\(.*\)", m) else f"({m})" for m in dict.fromkeys(masks))


def unrounded(expr: t.Expr, dtype: torch.dtype) -> t.Expr:
    """`expr` without a rounding to the float dtype that it is rounded to anyway."""
    while isinstance(expr, t.Op) and expr.name == "cast" and expr.dtype == dtype and is_float(dtype) and is_float(expr.args[0].dtype):
        (expr,) = expr.args
    return expr


def compute_type(dtype: torch.dtype) -> str:
    """The type in which a kernel holds values of a dtype."""
    return "tl.float32" if is_float(dtype) else triton_type(dtype)


def exact(expr: t.Expr, dtype: torch.dtype) -> bool:
    """Whether an expression's value is already one of `dtype`, so that rounding to it changes nothing."""
    if isinstance(expr, t.Load):
        return expr.dtype == dtype
    return isinstance(expr, t.Op) and expr.name == "cast" and expr.dtype == dtype
