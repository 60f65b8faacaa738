"""The schedule of attention regions with few queries: the keys are spread over several programs, and the last of these to arrive joins
their parts (`attention_meeting`).

The programs of a block of rows take its blocks of keys in turn, so that each has its share wherever the keys lie that rows see, and each
visits from the first to the last of its own keys that some row sees. Where they look at the whole mask first, the blocks that hold such
keys can be dealt out alone; where a program has but one block, it asks for that at once, and finds out meanwhile who else has such keys.

With 16 rows and more in a block, matrix units multiply. With fewer, each key is multiplied with each row in fp32; every place in a block
of keys then has a softmax of its own, so that nothing is exchanged between threads until all keys are seen.
"""

from __future__ import annotations

import math

import sympy
import torch
from dsi.ir import tile as t

from .attention_ahead import ask
from .attention_meeting import Parts, all_parts, meet, parts_dealt, parts_in_sight
from .attention_scan import bits_of_parts, greatest, keys_in_sight, least, scan, scannable
from .attention_tiles import LEAST_OF_A_PRODUCT, AttentionTiles
from .builder import Block, Builder, triton_type
from .kernel import Choice
from .statistics import divisible

BITS = 31  # parts that a bit each of an integer stands for
TOGETHER = 16  # keys of a mask that are loaded at once: blocks that are dealt out begin at a multiple
# What two softmaxes have (maximum of the scores, sum of the weights, sum of weighted values) made one.
JOIN = """\
@triton.jit
def {name}(top, total, out, top_2, total_2, out_2):
    new = tl.maximum(top, top_2)
    shift = {shift}
    one = {one}
    two = {two}
    return new, total * one + total_2 * two, out * one + out_2 * two
"""


class AttentionDecode(AttentionTiles):
    """Writes the kernel of one attention plan under one choice: `split` programs a block of rows; `block_s` as in `Attention`."""

    def __init__(self, spec: t.KernelSpec, choice: Choice):
        if choice.live not in ("", "parts", "seen", "dealt"):
            raise ValueError(f"a choice has live={choice.live!r}; known ways: parts, seen, dealt")
        if choice.chunks < 1:
            raise ValueError(f"a choice has {choice.chunks} chunks of keys; a program takes 1 at least")
        self.matrix = choice.block_m >= LEAST_OF_A_PRODUCT
        super().__init__(spec, choice)
        self.rows_at = "" if self.single else "[:, None]"
        keys, masked = self.keys, scannable(self.plan)
        known = not self.plan.window and keys.is_Integer
        self.scanned = choice.block_s > 1 and masked
        apart = masked and choice.live in ("parts", "seen") and choice.split <= BITS
        # Keys of a warp that are next to one another, as 16 bytes a thread lie.
        self.run = 32 // min(32, max(self.d[0].width * self.plan.dtype.itemsize // 16, 1))
        by_warp = choice.by_warp and self.single and len(self.e) == 1 and choice.block_n >= self.run * choice.num_warps
        self.chunks = choice.chunks if by_warp and known and (apart or not self.scanned) else 1
        if self.chunks > 1 and self.chunks * choice.block_n * choice.split < int(keys):
            self.chunks = 1  # there is more than one for each program
        run = self.chunks * choice.block_n
        self.blocks = math.ceil(math.ceil(int(keys) / run) / choice.split) if known else 0  # of a program; 0: not known
        # Each part is one block of keys (or some, taken as one), whatever the mask.
        self.apart = self.blocks == 1 and apart
        self.dealt = self.scanned and not self.apart and choice.live != ""
        self.one_of_keys = self.blocks == 1 and (self.apart or self.dealt or not self.scanned)
        self.early = choice.early and self.one_of_keys and not self.matrix
        self.by_warp = by_warp and self.one_of_keys
        self.part = ""
        self.parts: Parts | None = None  # who meets; None: all

    @property
    def keys_of_part(self) -> str:
        """Source of the number of keys that a part has one after the other."""
        return "BLOCK_J" if self.chunks == 1 else f"({self.chunks} * BLOCK_J)"

    def write(self) -> tuple[Builder, tuple[sympy.Expr, ...]]:
        """Writes the whole body and returns the builder and the launch grid."""
        split = self.choice.split
        self.open("tl.program_id(0) // SPLIT" if split > 1 else "tl.program_id(0)")
        if not self.early:
            self.load_queries()
        self.keys_loop()
        if split == 1:
            self.finish(self.builder.body, self.outs)
        else:
            meet(self, self.parts or all_parts(self.part, split))
        return self.builder, self.grid(split)

    def ahead(self) -> None:
        """Which part of the keys is the program's; and where the first block of them is visited whatever the mask, a request that it comes
        to the L2. That reads nothing: what a kernel before this one still writes there, the loads behind the wait will find."""
        builder, body, choice, plan = self.builder, self.builder.body, self.choice, self.plan
        if choice.split > 1:
            builder.constant("SPLIT", choice.split)
            self.part = builder.names.new("part")
            body.line(f"{self.part} = tl.program_id(0)" + ("" if self.one_block else " % SPLIT"))
        if not choice.prefetch or plan.window or (self.scanned and not self.apart):
            return
        block = Block(body)
        start = f"{self.part} * {self.keys_of_part} + " if self.part else ""
        asked = [
            ask(self, block, f"{start}{f'{chunk} * BLOCK_J + ' if chunk else ''}tl.arange(0, BLOCK_J)") for chunk in range(self.chunks)
        ]
        if any(asked):
            body.attach("if PDL:", block)

    # ------------------------------------------------------------------------------------------------------------------- keys

    def keys_loop(self) -> None:
        """Writes `top`, `total` and the sums of the program's own keys."""
        plan, choice = self.plan, self.choice
        keys, split = self.size(self.keys), choice.split
        end = [keys] + ([f"{self.last_query} + 1"] if plan.causal else [])
        begin = "0"
        if plan.window:
            begin = self.named("first_key", f"{greatest(['0', f'{self.first_query} - {plan.window - 1}'])} // BLOCK_J * BLOCK_J")
        stop = self.named("end_key", least(end))
        step = "BLOCK_J * SPLIT" if split > 1 else "BLOCK_J"
        own = begin if split == 1 else f"{self.part} * {self.keys_of_part}" if begin == "0" else f"{begin} + {self.part} * BLOCK_J"
        if self.dealt:
            own, stop = self.deal(begin, stop)
            self.key_mask = True
        elif self.one_of_keys:
            self.key_mask = not divisible(self.keys, choice.block_n * self.chunks * split)
        elif self.scanned:
            count = f"tl.cdiv({stop} - {begin}, {step}) * BLOCK_J" if begin != "0" else f"tl.cdiv({stop}, {step}) * BLOCK_J"
            looked_at = sympy.Integer(self.blocks * choice.block_n) if self.blocks and stop == keys else count
            found = scan(self, looked_at, self.key_of(begin), stop)
            own, stop = f"{found.first} // BLOCK_J * BLOCK_J", found.end
        if self.one_of_keys:
            self.only_block(own, stop)
        else:
            self.several_blocks(own, stop, step)

    def deal(self, begin: str, stop: str) -> tuple[str, str]:
        """Writes a look at the whole mask, and which blocks between the first and the last key that some row sees are the program's;
        returns the sources of where its first begins and of the end of all."""
        looked_at = self.keys if stop == self.size(self.keys) and begin == "0" else f"{stop} - {begin}" if begin != "0" else stop
        found = scan(self, looked_at, lambda seen: seen if begin == "0" else f"{begin} + {seen}", stop)
        start = self.named("start", f"{found.first} // {TOGETHER} * {TOGETHER}")
        if self.choice.split == 1:
            return start, found.end
        self.parts = parts_dealt(self, self.part, start, found)
        return f"{start} + {self.part} * BLOCK_J", found.end

    def key_of(self, begin: str):
        """The key of each number among the keys that are this program's own."""

        def key(seen: str) -> str:
            if self.choice.split > 1:
                seen = f"({seen} // BLOCK_J * SPLIT + {self.part}) * BLOCK_J + {seen} % BLOCK_J"
            return seen if begin == "0" else f"{begin} + {seen}"

        return key

    def only_block(self, start: str, stop: str) -> None:
        """The keys where a program has one block of them: its loads do not wait for one another."""
        body, axis = self.builder.body, 0 if self.single else 1
        meets = self.apart and self.choice.split > 1 and self.scanned
        chunks = [f"j_{number}" for number in range(self.chunks)] if self.chunks > 1 else ["j"]
        some_masked, k, v = self.key_mask, [], []
        for number, j in enumerate(chunks):
            self.keys_at, self.key_mask = j, some_masked
            offset = f"{number} * BLOCK_J + " if number else ""
            body.line(f"{j} = {f'{start} + ' if start != '0' else ''}{offset}tl.arange(0, BLOCK_J)")
            if some_masked:
                body.line(f"{j}_in = {j} < {stop if self.dealt else self.size(self.keys)}")
            if self.apart and self.choice.live == "seen":
                body.line(f"{j}_in = {keys_in_sight(self)}")
                self.key_mask = True
            k.append(self.keys_of(body))
            v.append(self.values_of(body))
        sight = bits_of_parts(self, stop, self.keys_of_part) if meets and not self.early else ""
        if self.early:
            # For compilers, which move no load over it; nothing is computed before q is there.
            body.comment("all that is loaded above is under way before anything is waited for")
            body.line("tl.debug_barrier()")
            self.load_queries()
        if meets:
            self.parts = parts_in_sight(self, self.part, sight or bits_of_parts(self, stop, self.keys_of_part))
        for number, j in enumerate(chunks):
            self.keys_at = j
            self.scores(body, k[number])
            if self.chunks > 1:
                body.line(f"scores_{number} = scores")
        if self.by_warp:
            self.softmaxes_of_warps([code for (code,) in v])
            return
        body.line(f"top = tl.max(scores, {axis})")
        body.line(f"shift = {self.shift('top')}")
        body.line(f"weights = {self.weight('scores', f'shift{self.rows_at}')}")
        body.line(f"total = tl.sum(weights, {axis})")
        for out, code in zip(self.outs, v[0], strict=True):
            if self.matrix:
                body.line(f"{out} = tl.dot({self.rounded('weights')}, {code}{self.ieee})")
            else:
                body.line(f"{out} = tl.sum({self.spread('weights')} * {self.every_row(code)}, {axis})")

    def softmaxes_of_warps(self, values: list[str]) -> None:
        """The softmax of the program's keys, where each warp makes its own of those that it holds: what the warps have is exchanged once,
        where a maximum, a sum and the sums of values would be three times. `top` and `total` then lie along channels."""
        builder, body, warps, out = self.builder, self.builder.body, self.choice.num_warps, self.outs[0]
        # A name of its own: what a branch gives another shape must not be there before it.
        join, shift = builder.names.new("join_softmaxes"), builder.names.new("shift_of_warp")
        one, two = (self.weight(top, "shift") for top in ("top", "top_2"))
        builder.helpers[join] = JOIN.format(name=join, shift=self.shift("new"), one=one, two=two)
        held = f"[BLOCK_J // {warps * self.run}, {warps}, {self.run}"
        numbers = [f"_{number}" for number in range(self.chunks)] if self.chunks > 1 else [""]
        keys = [builder.names.new(f"by_warp{number}") for number in numbers]
        body.comment(f"each of {warps} warps holds {self.run} keys in a row")
        for number, name in zip(numbers, keys, strict=True):
            body.line(f"{name} = tl.reshape(scores{number}, {held}])")
        body.line(f"top = tl.max({greatest([f'tl.max({name}, 0)' for name in keys])}, 1)[:, None]")
        body.line(f"{shift} = {self.shift('top')}")
        for number, name in zip(numbers, keys, strict=True):
            body.line(f"weights{number} = {self.weight(name, f'{shift}[None, :, :]')}")
        body.line(f"total = tl.sum({' + '.join(f'tl.sum(weights{number}, 0)' for number in numbers)}, 1)[:, None]")
        sums = [
            f"tl.sum(weights{number}[:, :, :, None] * tl.reshape({v}, {held}, {self.e[0].block}]), 0)"
            for number, v in zip(numbers, values, strict=True)
        ]
        body.line(f"{out} = {sums[0]}")
        for more in sums[1:]:
            body.line(f"{out} += {more}")
        body.line(f"{out} = tl.sum({out}, 1)")
        whole = f"[{warps}, {self.e[0].block}]"
        body.line(f"top, total, {out} = tl.reduce((tl.broadcast_to(top, {whole}), tl.broadcast_to(total, {whole}), {out}), 0, {join})")

    def several_blocks(self, start: str, stop: str, step: str) -> None:
        """The loop over a program's own blocks of keys."""
        body, choice, axis = self.builder.body, self.choice, 0 if self.single else 1
        rows = "[BLOCK_M]" if self.matrix else self.shape("m", "j")
        body.line(f'top = tl.full({rows}, float("-inf"), tl.float32)')
        body.line(f"total = tl.zeros({self.shape('m', 'j')}, tl.float32)")
        for part, out in zip(self.e, self.outs, strict=True):
            body.line(f"{out} = tl.zeros({self.shape('m', part) if self.matrix else self.shape('m', 'j', part)}, tl.float32)")
        loop = Block(body)
        loop.line("j = j0 + tl.arange(0, BLOCK_J)")
        if self.key_mask:
            loop.line(f"j_in = j < {stop if self.dealt else self.size(self.keys)}")
        k = self.keys_of(loop)
        # Loads that are not made ahead by several stages are at least made together.
        v = self.values_of(loop) if choice.num_stages == 1 else []
        self.scores(loop, k)
        top = self.builder.names.new("new_top")
        loop.line(f"{top} = tl.maximum(top, {'tl.max(scores, 1)' if self.matrix else 'scores'})")
        loop.line(f"shift = {self.shift(top)}")
        loop.line(f"weights = {self.weight('scores', 'shift[:, None]' if self.matrix else 'shift')}")
        loop.line(f"decay = {self.weight('top', 'shift')}")
        loop.line(f"total = total * {'decay[:, None]' if self.matrix else 'decay'} + weights")
        for out, code in zip(self.outs, v or self.values_of(loop), strict=True):
            if self.matrix:
                loop.line(f"{out} = tl.dot({self.rounded('weights')}, {code}, {out} * decay[:, None]{self.ieee})")
            else:
                loop.line(f"{out} = {out} * {self.spread('decay')} + {self.spread('weights')} * {self.every_row(code)}")
        loop.line(f"top = {top}")
        # Loads of products by matrix units are made ahead by the launch's number of stages, others by the loop's own.
        stages = f", num_stages={choice.num_stages}" if choice.num_stages > 1 and not self.matrix else ""
        body.attach(f"for j0 in {'tl.range' if stages else 'range'}({start}, {stop}, {step}{stages}):", loop)
        if self.matrix:
            body.line("total = tl.sum(total, 1)")
            return
        body.comment("the places in a block become one")
        body.line("place_top = top")
        body.line(f"top = tl.max(place_top, {axis})")
        body.line(f"shift = {self.shift('top')}")
        body.line(f"weights = {self.weight('place_top', f'shift{self.rows_at}')}")
        body.line(f"total = tl.sum(total * weights, {axis})")
        for out in self.outs:
            body.line(f"{out} = tl.sum({out} * {self.spread('weights')}, {axis})")

    def keys_of(self, block: Block) -> list[str]:
        """Writes the loads of a block of keys: channels by keys where matrix units multiply, else keys by channels."""
        axes = [(part, "j") if self.matrix else ("j", part) for part in self.d]
        return [self.operand(self.within(block, self.tile(*a)), self.plan.k, "k", self.shape(*a)) for a in axes]

    def values_of(self, block: Block) -> list[str]:
        """Writes the loads of a block of values."""
        axes = [("j", part) for part in self.e]
        return [self.operand(self.within(block, self.tile(*a)), self.plan.v, "v", self.shape(*a)) for a in axes]

    def scores(self, block: Block, keys: list[str]) -> None:
        """Writes the scores of a block of keys, hidden ones at -inf."""
        product = ""
        for q, k in zip(self.q, keys, strict=True):
            if self.matrix:
                product = f"tl.dot({q}, {k}{f', {product}' if product else ''}{self.ieee})"
            else:
                more = f"tl.sum({q}[None, :] * {k}, 1)" if self.single else f"tl.sum({q}[:, None, :] * {k}[None, :, :], 2)"
                product = f"{product} + {more}" if product else more
        self.score(block, "m", "j", product=product, sight=True)

    def spread(self, name: str) -> str:
        """Source of what has rows and keys, along channels."""
        return f"{name}[:, None]" if self.single else f"{name}[:, :, None]"

    def every_row(self, name: str) -> str:
        """Source of what has keys and channels, along rows."""
        return name if self.single else f"{name}[None, :, :]"

    def rounded(self, name: str) -> str:
        """Source of an operand of matrix units."""
        return name if self.plan.dtype == torch.float32 else f"{name}.to({triton_type(self.plan.dtype)})"
