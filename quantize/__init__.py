"""Number formats: weights rounded to int8, the modules that hold them, and their files."""

from .files import load_quantised, save_quantised
from .formats import INT8, Format, Grouping
from .int8 import Quantised, quantise
from .model import quantise_model
from .modules import QuantisedEmbedding, QuantisedLinear

__all__ = [
    "INT8",
    "Format",
    "Grouping",
    "Quantised",
    "QuantisedEmbedding",
    "QuantisedLinear",
    "load_quantised",
    "quantise",
    "quantise_model",
    "save_quantised",
]
