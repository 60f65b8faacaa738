"""A plain interpreter of plans: every point of every tile, by torch indexing. Slow; the oracle that a plan means what its region computes.

It is strict where a kernel is not: a load outside its tensor, a fresh output element written twice or never, and a size that nothing
binds all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch

from .index_map import FloorDiv, Mod
from .ops import attention_reference
from .pointwise import POINTWISE
from .quantised_ops import quantise_rows
from .tile import (
    AttentionPlan,
    B,
    C,
    Const,
    D,
    E,
    Expr,
    G,
    H,
    Index,
    J,
    K,
    LinearPlan,
    Load,
    Op,
    Permuted,
    Plan,
    R,
    Reduction,
    RowPlan,
    S,
    Scale,
    Statistic,
    Store,
    Test,
    Window,
)

Env = dict[sympy.Symbol, torch.Tensor]
Sizes = Mapping[sympy.Symbol, int]


def evaluate_plan(plan: Plan, tensors: Sequence[Any], sizes: Sizes | None = None, wide: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """The outputs of a region, in order, contiguous (written caches: like the cache given).

    `tensors`: the region's inputs, SymInt inputs as ints. `sizes`: the values of size symbols (`bind_sizes`). `wide`: what floats are
    computed in. Raises AssertionError where the plan breaks a promise of ir/tile.py.
    """
    run = _Run(tensors, dict(sizes or {}), wide)
    if isinstance(plan, LinearPlan):
        run.linear(plan)
    elif isinstance(plan, AttentionPlan):
        run.attention(plan)
    else:
        run.row(plan)
    assert sorted(run.outputs) == list(range(len(run.outputs))), f"outputs {sorted(run.outputs)}"
    return [run.outputs[i] for i in range(len(run.outputs))]


def evaluate_index(expr: sympy.Basic, env: Mapping[sympy.Symbol, torch.Tensor], sizes: Sizes) -> torch.Tensor:
    """An index expression or relation at every point of `env`."""
    if expr.is_Integer:
        return torch.tensor(int(expr))
    if expr in (sympy.true, sympy.false):
        return torch.tensor(expr is sympy.true)
    if expr.is_Symbol:
        if expr in env:
            return env[expr]
        assert expr in sizes, f"nothing gives a value to {expr}"
        return torch.tensor(sizes[expr])
    args = [evaluate_index(a, env, sizes) for a in expr.args] if not isinstance(expr, sympy.Piecewise) else []
    if expr.is_Add or expr.is_Mul:
        result = args[0]
        for a in args[1:]:
            result = result + a if expr.is_Add else result * a
        return result
    if isinstance(expr, FloorDiv):
        return torch.div(args[0], args[1], rounding_mode="floor")
    if isinstance(expr, Mod):
        assert bool((args[0] >= 0).all()), f"{expr} of a negative value"
        return args[0] % args[1]
    if isinstance(expr, sympy.Piecewise):
        *first, (last, _) = expr.args
        result = evaluate_index(last, env, sizes)
        for value, condition in reversed(first):
            result = torch.where(evaluate_index(condition, env, sizes), evaluate_index(value, env, sizes), result)
        return result
    by_name: dict[str, Callable[..., torch.Tensor]] = {
        "Max": torch.maximum,
        "Min": torch.minimum,
        "Pow": torch.pow,
        "StrictLessThan": torch.lt,
        "LessThan": torch.le,
        "StrictGreaterThan": torch.gt,
        "GreaterThan": torch.ge,
        "Equality": torch.eq,
        "Unequality": torch.ne,
        "And": torch.logical_and,
        "Or": torch.logical_or,
        "Not": torch.logical_not,
    }
    function = by_name.get(type(expr).__name__)
    assert function is not None, f"{expr} is no index expression"
    if len(args) <= 2:
        return function(*args)
    result = args[0]
    for a in args[1:]:
        result = function(result, a)
    return result


class _Run:
    def __init__(self, tensors: Sequence[Any], sizes: dict[sympy.Symbol, int], wide: torch.dtype):
        self.tensors = [t if isinstance(t, torch.Tensor) else torch.tensor(t) for t in tensors]
        self.sizes, self.wide = sizes, wide
        self.outputs: dict[int, torch.Tensor] = {}

    def size(self, expr: sympy.Expr | int) -> int:
        return int(evaluate_index(sympy.sympify(expr), {}, self.sizes))

    def grid(self, *symbols: tuple[sympy.Symbol, sympy.Expr | int]) -> Env:
        """Index tensors, each along a dimension of its own, that broadcast to the whole grid."""
        rank = len(symbols)
        return {s: torch.arange(self.size(n)).reshape([-1 if d == i else 1 for d in range(rank)]) for i, (s, n) in enumerate(symbols)}

    # --------------------------------------------------------------------------------------------------------------------- plans

    def linear(self, plan: LinearPlan) -> None:
        rows, inner = self.size(plan.rows), self.size(plan.inner)
        env = self.grid((R, plan.rows), (K, plan.inner))
        row_statistics: list[dict[str, torch.Tensor]] = []
        prologue = _Values(self, statistic=lambda s, e: row_statistics[s.reduction][s.which][e[R]])
        for reduction in plan.reductions:
            assert reduction.over == K
            row_statistics.append(self._moments(reduction, _full(prologue(reduction.body, env), env)))
        x = _full(prologue(plan.x, env), env).to(plan.x_dtype).to(self.wide)
        assert x.shape == (rows, inner)
        steps: torch.Tensor | float = 1.0
        if plan.activations:
            assert plan.activations == "int8", plan.activations
            x, steps = (part.to(self.wide) for part in quantise_rows(x))
        for store in plan.row_stores:
            self.store(store, env, prologue)
        for segment in plan.segments:
            columns = self.grid((C, segment.size))[C]
            windows = []
            for window in segment.windows:
                weight = self.tensors[window.weight].to(self.wide)
                n = evaluate_index(window.n, {C: columns}, self.sizes).expand_as(columns)
                weight = weight[:inner, n].T if window.kn else weight[n, :inner]  # a plan may read the beginning of each row alone
                assert (self.tensors[window.weight].dtype == torch.int8) == (window.scale is not None), "int8 weights have scales"
                if window.scale is not None:
                    weight = weight * self.scales(window.scale, columns, inner)
                windows.append(x @ weight.T * steps)
            held: list[dict[str, torch.Tensor]] = []
            epilogue = _Values(self, partial(_of_window, windows), partial(_of_group, held))
            env = self.grid((R, plan.rows), (C, segment.size))
            assert self.size(segment.size) % segment.hold == 0, "columns come in whole groups"
            for reduction in segment.reductions:
                size = self.size(reduction.size)
                assert reduction.over == C and segment.hold % size == 0
                group = {R: env[R][..., None], C: (env[C] - env[C] % size)[..., None] + torch.arange(size)}
                held.append(self._moments(reduction, _full(epilogue(reduction.body, group), group)))
            self._check_groups(segment.stores, segment.hold, env)
            for store in segment.stores:
                self.store(store, env, epilogue)

    def scales(self, scale: Scale, columns: torch.Tensor, inner: int) -> torch.Tensor:
        """The scale of each element of a window's weight, columns x inner; each is one for all of its group."""
        k = torch.arange(inner)
        at = [evaluate_index(c, {C: columns[:, None], K: k}, self.sizes).expand(len(columns), inner) for c in scale.coords]
        result = self.tensors[scale.input].to(self.wide)[tuple(at)]
        first = k - k % scale.group if scale.group else torch.zeros_like(k)
        assert bool((result == result[:, first]).all()), f"{scale} differs within a group"
        return result

    def _check_groups(self, stores: Sequence[Store], hold: int, env: Env) -> None:
        """A permuted value comes from the same aligned group of `hold` columns."""
        stack: list[Expr] = [s.value for s in stores]
        seen: set[int] = set()
        while stack:
            expr = stack.pop()
            if id(expr) in seen:
                continue
            seen.add(id(expr))
            if isinstance(expr, Permuted):
                source = evaluate_index(expr.source, env, self.sizes)
                assert bool((source // hold == env[C] // hold).all()), f"{expr.source} leaves its group of {hold}"
                stack.append(expr.body)
            if isinstance(expr, Op):
                stack.extend(expr.args)

    def row(self, plan: RowPlan) -> None:
        env = self.grid((R, plan.rows), (C, plan.columns))
        statistics: list[dict[str, torch.Tensor]] = []
        values = _Values(self, statistic=lambda s, e: statistics[s.reduction][s.which][e[R]])
        for reduction in plan.reductions:
            assert reduction.over == C and reduction.size == plan.columns
            statistics.append(self._moments(reduction, _full(values(reduction.body, env), env)))
        for store in plan.stores:
            self.store(store, env, values)

    def attention(self, plan: AttentionPlan) -> None:
        plain = _Values(self)
        names = {B: plan.batch, H: plan.heads, G: plan.kv_heads, S: plan.queries, J: plan.keys, D: plan.head_size, E: plan.value_size}

        def operand(expr: Expr, *symbols: sympy.Symbol) -> torch.Tensor:
            env = self.grid(*((s, names[s]) for s in symbols))
            return _full(plain(expr, env), env)

        q, k, v = (
            operand(e, *at).to(plan.dtype).to(self.wide)
            for e, at in ((plan.q, (B, H, S, D)), (plan.k, (B, G, J, D)), (plan.v, (B, G, J, E)))
        )
        mask, bias = (None if e is None else operand(e, B, H, S, J) for e in (plan.mask, plan.bias))
        sinks = None if plan.sinks is None else operand(plan.sinks, H)
        attributes: dict[str, Any] = {"scale": plan.scale, "causal": plan.causal, "window": plan.window, "softcap": plan.softcap}
        result = attention_reference(q, k, v, mask, bias, sinks, **attributes)
        values = _Values(self, window=lambda w, e: result[e[B], e[H], e[S], e[E]])
        for store in plan.stores:
            self.store(store, self.grid(*((s, names[s]) for s in (B, H, S, E))), values)

    # --------------------------------------------------------------------------------------------------------------------- parts

    def _moments(self, reduction: Reduction, body: torch.Tensor) -> dict[str, torch.Tensor]:
        if reduction.kind == "rms":
            return {"rstd": torch.rsqrt(body.square().mean(-1) + reduction.eps)}
        assert reduction.kind == "layer", reduction.kind
        return {"mean": body.mean(-1), "rstd": torch.rsqrt(body.var(-1, unbiased=False) + reduction.eps)}

    def store(self, store: Store, env: Env, values: _Values) -> None:
        shape = torch.broadcast_shapes(*(t.shape for t in env.values()))
        coords = [(values(c, env) if isinstance(c, Expr) else evaluate_index(c, env, self.sizes)).expand(shape) for c in store.coords]
        value = values(store.value, env).expand(shape).to(store.dtype)
        assert store.output not in self.outputs, f"output {store.output} is stored twice"
        if store.base is not None:
            target = self.tensors[store.base].clone()
            assert all(bool(((c >= 0) & (c < n)).all()) for c, n in zip(coords, target.shape, strict=True)), "a write outside of its cache"
        else:
            target = torch.empty([int(c.max()) + 1 for c in coords], dtype=store.dtype)
            written = torch.zeros(target.shape, dtype=torch.int64)
            written.index_put_(tuple(coords), torch.tensor(1), accumulate=True) if coords else written.add_(value.numel())
            assert bool((written == 1).all()), f"output {store.output} is not written once at every element"
        if coords:
            target[tuple(coords)] = value
        else:
            target.copy_(value.reshape(()))
        self.outputs[store.output] = target


def _of_window(windows: list[torch.Tensor], window: Window, env: Env) -> torch.Tensor:
    return windows[window.index][env[R], env[C]]


def _of_group(held: list[dict[str, torch.Tensor]], statistic: Statistic, env: Env) -> torch.Tensor:
    return held[statistic.reduction][statistic.which][env[R], env[C]]


class _Values:
    """Expressions at every point of an environment of index tensors."""

    def __init__(
        self,
        run: _Run,
        window: Callable[[Window, Env], torch.Tensor] | None = None,
        statistic: Callable[[Statistic, Env], torch.Tensor] | None = None,
    ):
        self.run, self.window, self.statistic = run, window, statistic
        self._memo: dict[tuple[int, int], tuple[Expr, Env, torch.Tensor]] = {}

    def __call__(self, expr: Expr, env: Env) -> torch.Tensor:
        key = (id(expr), id(env))
        if key not in self._memo:
            self._memo[key] = (expr, env, self._evaluate(expr, env))
        return self._memo[key][2]

    def _evaluate(self, expr: Expr, env: Env) -> torch.Tensor:
        if isinstance(expr, Load):
            tensor = self.run.tensors[expr.input]
            assert tensor.dtype == expr.dtype and tensor.dim() == len(expr.coords), (
                f"{expr} of a {tensor.dtype} tensor {list(tensor.shape)}"
            )
            at = [self(c, env) if isinstance(c, Expr) else evaluate_index(c, env, self.run.sizes) for c in expr.coords]
            for c, n in zip(at, tensor.shape, strict=True):
                assert bool(((c >= 0) & (c < n)).all()), f"{expr} outside of {list(tensor.shape)}"
            return self._widen(tensor[tuple(at)] if at else tensor)
        if isinstance(expr, Const):
            return self._widen(torch.tensor(expr.value, dtype=expr.dtype if not expr.dtype.is_floating_point else self.run.wide))
        if isinstance(expr, Index):
            return evaluate_index(expr.expr, env, self.run.sizes)
        if isinstance(expr, Test):
            return evaluate_index(expr.condition, env, self.run.sizes)
        if isinstance(expr, Window):
            assert self.window is not None, "no window here"
            return self.window(expr, env)
        if isinstance(expr, Statistic):
            assert self.statistic is not None, "no statistic here"
            return self.statistic(expr, env)
        if isinstance(expr, Permuted):
            return self(expr.body, {**env, expr.symbol: evaluate_index(expr.source, env, self.run.sizes)})
        assert isinstance(expr, Op), expr
        args = [self(a, env) for a in expr.args]
        result = args[0] if expr.name == "cast" else POINTWISE[expr.name].function(*args)
        if expr.name == "cast" or not expr.dtype.is_floating_point:
            result = result.to(expr.dtype)
        return self._widen(result)

    def _widen(self, value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            return value.to(self.run.wide)
        return value if value.dtype == torch.bool else value.to(torch.int64)


def _full(value: torch.Tensor, env: Env) -> torch.Tensor:
    return value.expand(torch.broadcast_shapes(*(t.shape for t in env.values())))
