"""x * cos + turned(x) * sin   ->   dsi.rope

turned(x) is cat(-x[D/2:], x[:D/2]) in the half-split style, and the pairs (-x[1], x[0]), (-x[3], x[2]), … in the interleaved one. How cos
and sin are brought to a shape that broadcasts stays outside. Seen in: Llama, Mistral, Qwen, Phi, GPT-NeoX (half); GPT-J (interleaved).
"""

from dsi.patterns.rule import Rule


class Rope(Rule):
    dims = {"x": "... D", "cos": "~... D", "sin": "~... D"}

    def pattern(self, op, x, cos, sin, half, end, sizes):
        def half_split():
            return op.cat([-op.slice(x, -1, half, end), op.slice(x, -1, 0, half)], -1)

        def interleaved():
            return op.view(op.stack([-op.slice(x, -1, 1, end, 2), op.slice(x, -1, 0, end, 2)], -1).named("pairs"), sizes)

        turned = op.either("style", half=half_split, interleaved=interleaved)
        return x * cos + turned * sin

    def check(self, m):
        d = m.shape("x")[-1]
        m.require(isinstance(d, int), "the size of a head is symbolic")
        m.require(d % 2 == 0, f"a head has {d} channels, an odd number")
        m.require(m.is_int("end") and m.end >= d, f"the last channel turned is {m.end}, the head has {d}")
        if m.tag("style") == "half":
            m.require(m.is_int("half") and 2 * m.half == d, f"the halves meet at {m.half}, the head has {d} channels")
        m.require(m.dtype("x") == m.dtype("cos") == m.dtype("sin"), f"x is {m.dtype('x')}, cos {m.dtype('cos')}, sin {m.dtype('sin')}")
        m.require(m.dtype("x").is_floating_point, f"x is {m.dtype('x')}")

    def rewrite(self, dsi, m):
        return dsi.rope(m.x, m.cos, m.sin, style=m.tag("style"))

    def sample(self, s):
        b, h, t, d = s.size("B"), s.size("H"), s.size("T"), 2 * s.size("P")
        table = s.pick(([t, d], [b, 1, t, d], [1, 1, t, d]))
        return {
            "x": s.tensor_of([b, h, t, d]),
            "cos": s.tensor_of(table),
            "sin": s.tensor_of(table),
            "half": s.pick((d // 2, d // 2, d // 2 - 1)),
            "end": s.pick((d, 10**9)),
            "sizes": [b, h, t, d],
        }
