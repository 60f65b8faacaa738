"""The schedule of attention regions with many queries: one pass over the keys with a running softmax.

Blocks of keys that every row of a program sees are visited first, and nothing is hidden in them; then those at the edges (the diagonal of
a causal mask, the far end of a window, padding, a last block cut short). Blocks that no row sees are not visited.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import sympy
import torch

from .attention_scan import greatest, least, scan, scannable
from .attention_tiles import AttentionTiles
from .builder import Block, Builder, triton_type


@dataclass
class Bounds:
    """Sources of bounds of the keys that some row may see, from `first` to `end`, and of those in which nothing is hidden, from `low` to
    `high`. The greatest and the least of each hold. With a `first` there is a `low`."""

    first: list[str] = field(default_factory=list)
    end: list[str] = field(default_factory=list)
    low: list[str] = field(default_factory=list)
    high: list[str] = field(default_factory=list)


class Attention(AttentionTiles):
    """Writes the kernel of one attention plan under one choice. `block_s`: keys a step of the scan of the mask (1: no scan)."""

    def write(self) -> tuple[Builder, tuple[sympy.Expr, ...]]:
        """Writes the whole body and returns the builder and the launch grid."""
        plan, body = self.plan, self.builder.body
        # Where a query sees the keys before it, the last rows have the most to do: their programs start first.
        last_first = plan.causal or plan.mask is not None
        self.open("tl.num_programs(0) - 1 - tl.program_id(0)" if last_first else "tl.program_id(0)")
        self.load_queries()
        body.line('top = tl.full([BLOCK_M], float("-inf"), tl.float32)')
        body.line("total = tl.zeros([BLOCK_M], tl.float32)")
        for part, out in zip(self.e, self.outs, strict=True):
            body.line(f"{out} = tl.zeros({self.shape('m', part)}, tl.float32)")
        self.loops()
        self.finish(body, self.outs)
        return self.builder, self.grid()

    def bounds(self) -> tuple[Bounds, bool]:
        """What is known of the keys that rows see, by the plan and by a scan of the mask; and whether a row may be forbidden keys within
        `low` and `high` all the same."""
        plan, keys = self.plan, self.size(self.keys)
        bounds = Bounds(end=[keys], high=[keys])
        if plan.causal:
            bounds.end.append(f"{self.last_query} + 1")
            bounds.high.append(f"{self.first_query} + 1")
        if plan.window:
            bounds.first += ["0", f"{self.first_query} - {plan.window - 1}"]
            bounds.low += ["0", f"{self.last_query} - {plan.window - 1}"]
        hides = plan.mask is not None and plan.mask.dtype == torch.bool
        if self.choice.block_s == 1 or not scannable(self.plan):
            return bounds, hides
        begin = self.named("first_key", greatest(["0", *bounds.first]))
        stop = self.named("end_key", least(bounds.end))
        count = (self.keys if stop == keys else stop) if begin == "0" else f"{stop} - {begin}"
        found = scan(self, count, lambda number: number if begin == "0" else f"{begin} + {number}", stop, common=hides)
        bounds.first, bounds.end = [found.first], [found.end]
        # A hidden key of a mask that is added gets its -inf wherever it is visited.
        bounds.low.append(found.first_common if hides else found.first)
        bounds.high = [*bounds.high[1:], found.end_common if hides else found.end]
        return bounds, False

    def loops(self) -> None:
        """The loops over blocks of keys: those in which nothing is hidden, and the others."""
        plan, body, names = self.plan, self.builder.body, self.builder.names
        bounds, anywhere = self.bounds()
        edges = bool(plan.causal or plan.window or self.key_mask) or (plan.mask is not None and plan.mask.dtype == torch.bool)
        few = self.keys.is_Integer and int(self.keys) < self.choice.block_n
        end = least(bounds.end)
        if anywhere or few or not edges:
            start = f"{greatest(bounds.first)} // BLOCK_J * BLOCK_J" if bounds.first else "0"
            body.attach(f"for j0 in range({start}, {end}, BLOCK_J):", self.step(Block(body), edges))
            return
        body.comment("blocks of keys that every row sees")
        whole = names.new("whole")
        if not bounds.low:
            body.line(f"{whole} = {least(bounds.high)} // BLOCK_J * BLOCK_J")
            body.attach(f"for j0 in range(0, {whole}, BLOCK_J):", self.step(Block(body), False))
            body.comment("and the others")
            body.attach(f"for j0 in range({whole}, {end}, BLOCK_J):", self.step(Block(body), True))
            return
        low, number = names.new("low"), names.new("i")
        body.line(f"{low} = tl.cdiv({greatest(bounds.low)}, BLOCK_J)")
        body.line(f"{whole} = tl.maximum({least(bounds.high)} // BLOCK_J - {low}, 0)")
        body.attach(f"for j0 in range({low} * BLOCK_J, ({low} + {whole}) * BLOCK_J, BLOCK_J):", self.step(Block(body), False))
        body.comment("and the others, on both sides of them")
        others = Block(body)
        others.line(f"j0 = tl.where({number} < {low}, {number}, {number} + {whole}) * BLOCK_J")
        first = f"{greatest(bounds.first)} // BLOCK_J"
        body.attach(f"for {number} in range({first}, tl.cdiv({end}, BLOCK_J) - {whole}):", self.step(others, True))

    def step(self, loop: Block, sight: bool) -> Block:
        """One block of keys; some of them may be hidden where `sight`."""
        plan, whole = self.plan, self.key_mask
        self.key_mask = whole and sight
        loop.line("j = j0 + tl.arange(0, BLOCK_J)")
        if self.key_mask:
            loop.line(f"j_in = j < {self.size(self.keys)}")
        product = ""
        for part, q in zip(self.d, self.q, strict=True):
            k = self.operand(self.within(loop, self.tile(part, "j")), plan.k, "k", self.shape(part, "j"))
            sums = f", {product}" if product else ""
            product = f"tl.dot({q}, {k}{sums}{self.ieee})"
            if part is not self.d[-1]:
                product = f"({product})"
        self.score(loop, "m", "j", product=product, sight=sight)
        top = self.builder.names.new("new_top")
        loop.line(f"{top} = tl.maximum(top, tl.max(scores, 1))")
        loop.line(f"shift = {self.shift(top)}")
        loop.line(f"weights = {self.weight('scores', 'shift[:, None]')}")
        loop.line(f"decay = {self.weight('top', 'shift')}")
        loop.line("total = total * decay + tl.sum(weights, 1)")
        weights = "weights"
        if plan.dtype != torch.float32:
            weights = f"weights.to({triton_type(plan.dtype)})"
        for part, out in zip(self.e, self.outs, strict=True):
            v = self.operand(self.within(loop, self.tile("j", part)), plan.v, "v", self.shape("j", part))
            loop.line(f"{out} = tl.dot({weights}, {v}, {out} * decay[:, None]{self.ieee})")
        loop.line(f"top = {top}")
        self.key_mask = whole
        return loop
