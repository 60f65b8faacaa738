"""The rules, one a file. In which stage and in which order they run is said in `passes/normalise.py` and `passes/recognise.py`."""

from dsi.patterns.rule import Rule

from .attention import Attention
from .attention_grouped import AttentionGrouped
from .attention_one_head import AttentionOneHead
from .attention_shared import AttentionShared
from .cast_chain import CastChain
from .cast_device import CastDevice
from .embedding import Embedding
from .fill_chain import FillChain
from .filled_parts import FilledParts
from .gated import Gated
from .gelu import Gelu
from .kept_dimension import KeptDimension
from .kv_write import KvWrite
from .layer_norm import LayerNorm
from .layer_norm_spelled import LayerNormSpelled
from .linear import Linear, LinearBatched, LinearFlattened, LinearOfOne
from .lowest_bound import LowestBound
from .moved_scores import MovedScores
from .moved_units import MovedUnits
from .neutral_element import NeutralElement
from .no_op_cast import NoOpCast
from .no_op_copy import NoOpCopy
from .no_op_dropout import NoOpDropout
from .no_op_view import NoOpView
from .norm_of_sum import NormOfSum
from .outer_product import OuterProduct
from .partial_rope import PartialRope
from .permute_chain import PermuteChain
from .permuted_scores import PermutedScores
from .pointwise_convolution import PointwiseConvolution
from .product_without_term import ProductWithoutTerm
from .regrouped_term import RegroupedTerm
from .relu import Relu
from .repeated_heads import RepeatedHeads
from .rms_norm import RmsNorm
from .rms_norm_behind import RmsNormBehind
from .rms_norm_fused import RmsNormFused
from .rms_norm_length import RmsNormLength
from .rope import Rope
from .rope_parts import RopeParts
from .round_trip import RoundTrip
from .scaled_queries import ScaledQueries
from .scaled_terms import ScaledTerms
from .scattered_rows import ScatteredRows
from .shifted_softmax import ShiftedSoftmax
from .silu import Silu
from .sink_after import SinkAfter
from .softmax_cast import SoftmaxCast
from .softmax_spelled import SoftmaxSpelled
from .softmax_view import SoftmaxView
from .split_spelling import SplitSpelling
from .squared_length import SquaredLength
from .squeezed_permute import SqueezedPermute
from .std_spelling import StdSpelling
from .subtracted_term import SubtractedTerm
from .sum_of_mean import SumOfMean
from .swapped_contraction import SwappedContraction
from .symbolic_heads import SymbolicHeads
from .tanh import Tanh
from .transpose_spelling import TransposeSpelling
from .turned_activation import TurnedActivation
from .unsqueezed_view import UnsqueezedView
from .var_mean_parts import VarMeanParts
from .view_chain import ViewChain
from .view_spelling import ViewSpelling
from .viewed_product import ViewedProduct
from .weighted_rows import WeightedRows
from .windowed_scores import WindowedScores
from .written_part import WrittenPart

RULES: tuple[type[Rule], ...] = (
    Attention,
    AttentionGrouped,
    AttentionOneHead,
    AttentionShared,
    CastChain,
    CastDevice,
    Embedding,
    FillChain,
    FilledParts,
    Gated,
    Gelu,
    KeptDimension,
    KvWrite,
    LayerNorm,
    LayerNormSpelled,
    Linear,
    LinearBatched,
    LinearFlattened,
    LinearOfOne,
    LowestBound,
    MovedScores,
    MovedUnits,
    NeutralElement,
    NoOpCast,
    NoOpCopy,
    NoOpDropout,
    NoOpView,
    NormOfSum,
    OuterProduct,
    PartialRope,
    PermuteChain,
    PermutedScores,
    PointwiseConvolution,
    ProductWithoutTerm,
    RegroupedTerm,
    Relu,
    RepeatedHeads,
    RmsNorm,
    RmsNormBehind,
    RmsNormFused,
    RmsNormLength,
    Rope,
    RopeParts,
    RoundTrip,
    ScaledQueries,
    ScaledTerms,
    ScatteredRows,
    ShiftedSoftmax,
    Silu,
    SinkAfter,
    SoftmaxCast,
    SoftmaxSpelled,
    SoftmaxView,
    SplitSpelling,
    SquaredLength,
    SqueezedPermute,
    StdSpelling,
    SubtractedTerm,
    SumOfMean,
    SwappedContraction,
    SymbolicHeads,
    Tanh,
    TransposeSpelling,
    TurnedActivation,
    UnsqueezedView,
    VarMeanParts,
    ViewChain,
    ViewSpelling,
    ViewedProduct,
    WeightedRows,
    WindowedScores,
    WrittenPart,
)
