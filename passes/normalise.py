"""normalise: complex values in reals, casts, copies and views tidied, so that the rules after it meet one spelling of everything."""

from __future__ import annotations

from dsi.ir.context import Context
from dsi.patterns.engine import apply_rules
from dsi.patterns.rule import Rule
from dsi.patterns.rules.cast_chain import CastChain
from dsi.patterns.rules.cast_device import CastDevice
from dsi.patterns.rules.fill_chain import FillChain
from dsi.patterns.rules.filled_parts import FilledParts
from dsi.patterns.rules.kept_dimension import KeptDimension
from dsi.patterns.rules.lowest_bound import LowestBound
from dsi.patterns.rules.moved_scores import MovedScores
from dsi.patterns.rules.moved_units import MovedUnits
from dsi.patterns.rules.neutral_element import NeutralElement
from dsi.patterns.rules.no_op_cast import NoOpCast
from dsi.patterns.rules.no_op_copy import NoOpCopy
from dsi.patterns.rules.no_op_dropout import NoOpDropout
from dsi.patterns.rules.no_op_view import NoOpView
from dsi.patterns.rules.norm_of_sum import NormOfSum
from dsi.patterns.rules.outer_product import OuterProduct
from dsi.patterns.rules.permute_chain import PermuteChain
from dsi.patterns.rules.permuted_scores import PermutedScores
from dsi.patterns.rules.pointwise_convolution import PointwiseConvolution
from dsi.patterns.rules.product_without_term import ProductWithoutTerm
from dsi.patterns.rules.regrouped_term import RegroupedTerm
from dsi.patterns.rules.round_trip import RoundTrip
from dsi.patterns.rules.scaled_queries import ScaledQueries
from dsi.patterns.rules.scaled_terms import ScaledTerms
from dsi.patterns.rules.scattered_rows import ScatteredRows
from dsi.patterns.rules.shifted_softmax import ShiftedSoftmax
from dsi.patterns.rules.sink_after import SinkAfter
from dsi.patterns.rules.softmax_cast import SoftmaxCast
from dsi.patterns.rules.softmax_spelled import SoftmaxSpelled
from dsi.patterns.rules.softmax_view import SoftmaxView
from dsi.patterns.rules.split_spelling import SplitSpelling
from dsi.patterns.rules.squared_length import SquaredLength
from dsi.patterns.rules.squeezed_permute import SqueezedPermute
from dsi.patterns.rules.std_spelling import StdSpelling
from dsi.patterns.rules.subtracted_term import SubtractedTerm
from dsi.patterns.rules.sum_of_mean import SumOfMean
from dsi.patterns.rules.swapped_contraction import SwappedContraction
from dsi.patterns.rules.transpose_spelling import TransposeSpelling
from dsi.patterns.rules.turned_activation import TurnedActivation
from dsi.patterns.rules.unsqueezed_view import UnsqueezedView
from dsi.patterns.rules.var_mean_parts import VarMeanParts
from dsi.patterns.rules.view_chain import ViewChain
from dsi.patterns.rules.view_spelling import ViewSpelling
from dsi.patterns.rules.viewed_product import ViewedProduct
from dsi.patterns.rules.weighted_rows import WeightedRows
from dsi.patterns.rules.windowed_scores import WindowedScores
from dsi.patterns.rules.written_part import WrittenPart
from torch import fx

from .complexes import in_reals

# Run in this order, over and over until none applies.
RULES: tuple[type[Rule], ...] = (
    ViewSpelling,
    TransposeSpelling,
    SplitSpelling,
    CastDevice,
    SoftmaxCast,
    NoOpDropout,
    NoOpCast,
    CastChain,
    NoOpCopy,
    NeutralElement,
    NoOpView,
    SqueezedPermute,
    UnsqueezedView,
    ViewChain,
    PermuteChain,
    PermutedScores,
    MovedScores,
    MovedUnits,
    RoundTrip,
    OuterProduct,
    SquaredLength,
    VarMeanParts,
    SumOfMean,
    KeptDimension,
    RegroupedTerm,  # before SoftmaxView, which moves the second view away
    SoftmaxView,
    FilledParts,
    WrittenPart,
    SoftmaxSpelled,
    FillChain,
    ProductWithoutTerm,
    ScaledQueries,
    ScaledTerms,
    LowestBound,
    StdSpelling,
    ShiftedSoftmax,
    SubtractedTerm,
    ViewedProduct,
    WeightedRows,
    SwappedContraction,
    NormOfSum,
    SinkAfter,
    WindowedScores,
    ScatteredRows,
    PointwiseConvolution,
    TurnedActivation,
)


def normalise(gm: fx.GraphModule, context: Context) -> None:
    """Writes complex values in reals, then applies `RULES`, and the user's rules of this stage before them, to a fixpoint."""
    in_reals(gm, context)
    own = tuple(rule for rule in getattr(context.options, "rules", ()) if rule.stage == "normalise")
    apply_rules(gm, (*own, *RULES), context, fixpoint=True)
