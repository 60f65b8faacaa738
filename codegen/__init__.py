"""Code generation: a region's plan printed as a readable Triton kernel, one schedule and one set of blocks a variant."""

from .emit import generate
from .kernel import Argument, Choice, Kernel, Launch, Workspace

__all__ = ["Argument", "Choice", "Kernel", "Launch", "Workspace", "generate"]
