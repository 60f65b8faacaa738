"""recognise: what a transformer computes becomes semantic operators, one node each."""

from __future__ import annotations

from dsi.ir.context import Context
from dsi.patterns.engine import apply_rules
from dsi.patterns.rule import Rule
from dsi.patterns.rules.attention import Attention
from dsi.patterns.rules.attention_grouped import AttentionGrouped
from dsi.patterns.rules.attention_one_head import AttentionOneHead
from dsi.patterns.rules.attention_shared import AttentionShared
from dsi.patterns.rules.embedding import Embedding
from dsi.patterns.rules.gated import Gated
from dsi.patterns.rules.gelu import Gelu
from dsi.patterns.rules.kv_write import KvWrite
from dsi.patterns.rules.layer_norm import LayerNorm
from dsi.patterns.rules.layer_norm_spelled import LayerNormSpelled
from dsi.patterns.rules.linear import Linear, LinearBatched, LinearFlattened, LinearOfOne
from dsi.patterns.rules.no_op_copy import NoOpCopy
from dsi.patterns.rules.no_op_view import NoOpView
from dsi.patterns.rules.partial_rope import PartialRope
from dsi.patterns.rules.permute_chain import PermuteChain
from dsi.patterns.rules.relu import Relu
from dsi.patterns.rules.repeated_heads import RepeatedHeads
from dsi.patterns.rules.rms_norm import RmsNorm
from dsi.patterns.rules.rms_norm_behind import RmsNormBehind
from dsi.patterns.rules.rms_norm_fused import RmsNormFused
from dsi.patterns.rules.rms_norm_length import RmsNormLength
from dsi.patterns.rules.rope import Rope
from dsi.patterns.rules.rope_parts import RopeParts
from dsi.patterns.rules.silu import Silu
from dsi.patterns.rules.symbolic_heads import SymbolicHeads
from dsi.patterns.rules.tanh import Tanh
from dsi.patterns.rules.view_chain import ViewChain
from torch import fx

# Run once, in this order: what contains another rule's pattern comes before it, what builds on its operator after it.
RULES: tuple[type[Rule], ...] = (
    Attention,
    AttentionGrouped,
    AttentionOneHead,
    AttentionShared,
    RepeatedHeads,
    SymbolicHeads,
    LayerNormSpelled,
    LayerNorm,
    RmsNorm,
    RmsNormFused,
    RmsNormLength,
    LinearFlattened,
    LinearBatched,
    LinearOfOne,
    Linear,
    RmsNormBehind,
    Gelu,
    Silu,
    Relu,
    Tanh,
    Gated,
    Rope,
    RopeParts,
    PartialRope,
    KvWrite,
    Embedding,
)

# What is left around semantic operators, whose results are contiguous: run over and over until none applies.
TIDY: tuple[type[Rule], ...] = (NoOpCopy, PermuteChain, ViewChain, NoOpView)


def recognise(gm: fx.GraphModule, context: Context) -> None:
    """Applies `RULES` once, then `TIDY`; the user's rules of this stage before them (on ATen) and after them (on semantic operators)."""
    own = tuple(rule for rule in getattr(context.options, "rules", ()) if rule.stage == "recognise")
    apply_rules(gm, (*own, *RULES, *own), context)
    apply_rules(gm, TIDY, context, fixpoint=True)
