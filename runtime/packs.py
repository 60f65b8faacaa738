"""Int8 packs of weights: made once a weight, shared by all graphs that read it, made again when the weight changes.

A lowered graph says which weights it wants as int8 (`dsi.quantize_weight`). `take_out` takes these operators out of it: the packs become
inputs, which keep their place between calls, and `Packed` hands them in beside the call's own. Each call looks at all such weights: another
Parameter, other memory or another version makes a pack anew. What leaves no such trace (a write through `.data`, or into a tensor that was
made under `inference_mode`) is said by `refresh`.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from dsi.ir.quantised_ops import dequantise
from dsi.quantize.formats import Format, Grouping
from dsi.quantize.int8 import quantise
from dsi.quantize.ops import quantize_weight
from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

PACKED = "dsi_packed"
"""Key of a placeholder's meta: it is a pack, and keeps its place between calls."""

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True)
class Wanted:
    """One `quantize_weight` of a graph: the number and the model's name of its weight among the inputs, and the operator's attributes."""

    input: int
    name: str
    kn: bool
    grouping: Grouping


class Pack:
    """The int8 form of one weight. The tensors stay the same ones when the weight is rounded again."""

    def __init__(self, wanted: Wanted):
        self.wanted = wanted
        self.weight: Tensor | None = None
        self.scales: Tensor | None = None
        self.state: Any = None
        self.memory: Callable[[], Any] = lambda: None  # that of `state`, weakly: once it is gone, its address may be another's
        self.lock = threading.Lock()

    def of(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """int8 and scales of `weight` as it is now."""
        state = _state(weight)
        if state != self.state or self.memory() is None:
            with self.lock:
                memory = weakref.ref(weight.untyped_storage())
                self._make(weight)
                self.state, self.memory = state, memory
        assert self.weight is not None and self.scales is not None
        return self.weight, self.scales

    def _make(self, weight: Tensor) -> None:
        # Ordinary tensors even under inference_mode, so that a later call outside of it may write to them.
        with torch.inference_mode(False), torch.no_grad():
            found = quantise(weight, Format(self.wanted.grouping), kn=self.wanted.kn, name=self.wanted.name)
            if self.weight is None or self.scales is None or not (_alike(self.weight, found.weight) and _alike(self.scales, found.scales)):
                self.weight, self.scales = found.weight, found.scales
            else:  # where they are, for recorded CUDA graphs
                self.weight.copy_(found.weight)
                self.scales.copy_(found.scales)


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.shape == other.shape


def _state(weight: Tensor) -> tuple[int, int]:
    """What changes when a weight is written, as far as torch knows."""
    return weight.data_ptr(), -1 if weight.is_inference() else weight._version


# Weight -> its packs by format. A pack lives as long as a graph that reads it, and its weight.
_packs: WeakIdKeyDictionary = WeakIdKeyDictionary()
_lock = threading.Lock()


def _pack_of(weight: Tensor, wanted: Wanted) -> Pack:
    key = wanted.kn, wanted.grouping
    with _lock:
        known = _packs.setdefault(weight, weakref.WeakValueDictionary())
        pack = known.get(key)
        if pack is None:
            pack = known[key] = Pack(wanted)
        return pack


def refresh(model: torch.nn.Module) -> int:
    """Have the int8 packs of `model`'s weights made again at the next call. Returns how many packs that concerns.

    For writes that torch cannot see: through `.data`, from outside torch, into tensors made under `torch.inference_mode`. A replaced
    Parameter, an in-place write and `load_state_dict` are seen without it.
    """
    global refreshed
    found = {id(pack): pack for tensor in _tensors(model) for pack in _packs.get(tensor, {}).values()}
    for pack in found.values():
        pack.state = None
    refreshed += 1
    return len(found)


refreshed = 0
"""How often `refresh` was called: whoever replays recorded work runs it anew when this has changed."""


def _tensors(model: torch.nn.Module) -> Iterable[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


# ---------------------------------------------------------------------------------------------------------------------- graphs


def take_out(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[list[Wanted], list[Any]]:
    """Turn each `quantize_weight` of the lowered graph `gm` into two placeholders behind its others. Returns what these stand for, and
    `inputs` with their fakes behind them."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    number = {node: i for i, node in enumerate(placeholders)}
    wanted: list[Wanted] = []
    extended = list(inputs)
    for node in gm.graph.find_nodes(op="call_function", target=quantize_weight):
        weight = node.args[0]
        grouping = Grouping(node.kwargs.get("grouping", "row"), node.kwargs.get("size", 0))
        wanted.append(Wanted(number[weight], node.meta.get("dsi_weight", weight.name), node.kwargs.get("kn", False), grouping))
        for index, role in enumerate(("int8", "scales")):
            with gm.graph.inserting_after(placeholders[-1]):
                made = gm.graph.placeholder(f"{weight.name}_{role}")
            made.target = made.name  # a weight read in two formats has several packs: names of nodes are told apart, targets are not
            made.meta = {"val": node.meta["val"][index], PACKED: True}
            placeholders.append(made)
            extended.append(made.meta["val"])
            for item in [user for user in node.users if user.target is operator.getitem and user.args[1] == index]:
                item.replace_all_uses_with(made)
                gm.graph.erase_node(item)
        gm.graph.erase_node(node)
    if wanted:
        gm.recompile()
    return wanted, extended


class Packed:
    """`run`, a boxed callable of a graph that `take_out` has changed, as one of the inputs that the graph had before."""

    _boxed_call = True

    def __init__(self, run: Boxed, wanted: Sequence[Wanted]):
        self.run, self.wanted = run, wanted
        self._last: list[tuple[Callable[[], Any], Pack]] = [(lambda: None, Pack(each)) for each in wanted]
        # Weight -> pack: where equal layers share a graph, each has one.
        self._all: list[WeakIdKeyDictionary] = [WeakIdKeyDictionary() for _ in wanted]

    def __call__(self, inputs: list[Any]) -> Sequence[Any]:
        packs: list[Tensor] = []
        for number, wanted in enumerate(self.wanted):
            weight = inputs[wanted.input]
            last, pack = self._last[number]
            if last() is not weight:
                pack = self._pack(number, weight)
            packs.extend(pack.of(weight))
        inputs.extend(packs)
        return self.run(inputs)

    def _pack(self, number: int, weight: Tensor) -> Pack:
        known = self._all[number]
        pack = known.get(weight)
        if pack is None:
            pack = known[weight] = _pack_of(weight, self.wanted[number])
        self._last[number] = weakref.ref(weight), pack
        return pack

    def dequantised(self, weight: Tensor, form: tuple[bool, Grouping]) -> Tensor | None:
        """What stands in for `weight` in this graph where it reads it in `form` (kn, grouping), in its layout and dtype; else None."""
        for wanted, known in zip(self.wanted, self._all, strict=True):
            if (wanted.kn, wanted.grouping) == form and (pack := known.get(weight)) is not None:
                entries, scales = pack.of(weight)
                wide = dequantise(entries, scales, group=wanted.grouping.inner_group(*entries.shape, kn=wanted.kn))
                return torch.empty_like(weight).copy_(wide.t() if wanted.kn else wide)
        return None
