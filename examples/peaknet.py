"""An architecture that dsi does not know, taught to it from outside: two rules and one Triton kernel. docs/rules.md walks through it.

PeakNet divides by the largest entry of a row where other models divide by its root mean square, and gates with a squared ReLU.

    python examples/peaknet.py             compile it, compare with eager, say what dsi did
    dsi explain examples/peaknet.py --html peaknet.html
"""

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

import dsi

# ---------------------------------------------------------------------------------------------------------------- the architecture


class PeakNorm(nn.Module):
    """x / (max |x| + eps) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float = 1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.abs().amax(-1, keepdim=True) + self.eps) * self.weight


class Block(nn.Module):
    """Attention, then an MLP whose gate is a squared ReLU."""

    def __init__(self, size: int, heads: int, inner: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = PeakNorm(size), PeakNorm(size)
        self.q, self.k, self.v, self.o = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(size, inner, bias=False), nn.Linear(size, inner, bias=False)
        self.down = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(self.gate(h).clamp(min=0).square() * self.up(h))


class PeakNet(nn.Module):
    """Token ids [B, S] -> logits [B, S, vocabulary]."""

    def __init__(self, vocabulary: int = 211, size: int = 64, heads: int = 4, inner: int = 96, layers: int = 2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.blocks = nn.ModuleList(Block(size, heads, inner) for _ in range(layers))
        self.norm, self.head = PeakNorm(size), nn.Linear(size, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ------------------------------------------------------------------------------------------- an operator: its meaning and its kernel


def peak_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What the operator means. It computes in float32 where x is narrower, and rounds once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.abs().amax(-1, keepdim=True) + eps) * weight).to(x.dtype)


@triton.jit
def peak_norm_kernel(x, weight, out, columns, eps, BLOCK: tl.constexpr):
    """One program a row of x [rows, columns]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    value = tl.load(x + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    peak = tl.max(tl.abs(value), axis=0)
    tl.store(out + row * columns + at, (value / (peak + eps) * scale).to(out.dtype.element_ty), mask=inside)


def peak_norm_launch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Computes the operator with the kernel, on the device of x."""
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty_like(x)
    columns = x.shape[-1]
    if x.numel():
        peak_norm_kernel[(x.numel() // columns,)](x, weight, out, columns, eps, BLOCK=triton.next_power_of_2(columns))
    return out


peak_norm = dsi.custom_op("peaknet::peak_norm", peak_norm_reference, kernel=peak_norm_launch)


# --------------------------------------------------------------------------------------------------------------------- the rules

aten = torch.ops.aten


class PeakNormRule(dsi.Rule):
    """x / (max |x| + eps) * weight   ->   peaknet::peak_norm"""

    dims = {"x": "... D", "weight": "D"}
    literals = {"eps": (1e-5, 1e-3)}

    def pattern(self, op, x, weight, eps):
        peak = op.amax(op.call(aten.abs.default, x), [-1], True)
        return x / (peak + eps) * weight

    def check(self, m):
        m.require(m.is_float("eps"), f"eps is {m.eps}, not a float")
        m.require(m.dtype("weight") == m.dtype("x"), f"x is {m.dtype('x')} and the weight {m.dtype('weight')}")

    def rewrite(self, dsi, m):
        return dsi.call(peak_norm, m.x, m.weight, m.eps)


class SquaredReluGate(dsi.Rule):
    """clamp(gate, 0)² * up   ->   dsi.gated, which a region takes into the epilogue of both linears"""

    dims = {"gate": "... N", "up": "... N"}

    def pattern(self, op, gate, up):
        return op.square(op.call(aten.clamp.default, gate, 0)) * up

    def check(self, m):
        m.require(m.dtype("gate") == m.dtype("up"), f"the gate is {m.dtype('gate')} and the other factor {m.dtype('up')}")

    def rewrite(self, dsi, m):
        return dsi.gated(m.gate, m.up, "relu_squared")


RULES = [PeakNormRule, SquaredReluGate]

# ---------------------------------------------------------------------------------------------------------------------- using it


def example():
    """What `dsi explain examples/peaknet.py` looks at: the rules hold for it as they are registered."""
    for rule in RULES:
        dsi.register(rule)
    return PeakNet().eval(), (torch.arange(12).reshape(1, 12),)


def main() -> None:
    """Compile PeakNet with and without the rules."""
    torch.manual_seed(0)
    model, ids = PeakNet().eval(), torch.randint(0, 211, (2, 12))
    if torch.cuda.is_available():
        model, ids = model.cuda(), ids.cuda()
    print("Without the rules:", *dsi.explain(model, ids).unfused_counted(), sep="\n  ")
    with torch.no_grad():
        logits = torch.compile(model, backend="dsi", options={"rules": RULES})(ids)
        print("Largest difference to eager:", (logits - model(ids)).abs().max().item())
    print(dsi.explain(model, ids, options={"rules": RULES}))


if __name__ == "__main__":
    main()
