"""What is seen of a model between two generations: whatever a recorded step would not follow."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from dsi.engine.generation.watch import Watch
from torch import nn

import dsi


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.norm = nn.BatchNorm1d(3)


def replaced(model):
    model.one.weight = nn.Parameter(model.one.weight.detach().clone())


def replaced_in_place_of_the_freed(model):
    for _ in range(8):  # wherever python and the allocator put it: maybe where the old one was
        del model.other.weight
        model.other.weight = nn.Parameter(torch.zeros(3, 3))


def written(model):
    with torch.no_grad():
        model.norm.running_mean.add_(1)


def cast(model):
    model.double()


def swapped(model):
    model.one.weight, model.other.weight = model.other.weight, model.one.weight


def tied(model):
    model.other.weight = model.one.weight


def without_a_bias(model):
    model.one.bias = None


def inference_memory(model):
    with torch.inference_mode():
        model.one.weight.data = torch.zeros(3, 3)


CHANGES = {
    change.__name__: change
    for change in (replaced, replaced_in_place_of_the_freed, written, cast, swapped, tied, without_a_bias, inference_memory)
} | {
    "another module": lambda model: setattr(model, "other", nn.Linear(3, 3, bias=False)),
    "one more module": lambda model: model.one.add_module("more", nn.Identity()),
    "one module less": lambda model: delattr(model, "norm"),
    "modules the other way round": lambda model: model._modules.update(one=model.other, other=model.one),
    "one more buffer": lambda model: model.one.register_buffer("more", torch.zeros(1)),
    "a hook": lambda model: model.one.register_forward_hook(lambda *_: None),
    "a hook before": lambda model: model.one.register_forward_pre_hook(lambda *_: None),
    "a forward of its own": lambda model: setattr(model.one, "forward", lambda x: x),
    "one that is no function": lambda model: setattr(model.one, "forward", torch.relu),
    "another class": lambda model: setattr(model.one, "__class__", type("Other", (nn.Linear,), {})),
    "training": lambda model: model.train(not model.training),
    "one module in training": lambda model: model.norm.train(not model.norm.training),
    "said by refresh": dsi.refresh,
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_seen_once(change):
    model = Two()
    watch = Watch(model)
    before = watch.look()
    assert watch.look() == before
    CHANGES[change](model)
    after = watch.look()
    assert after != before and watch.look() == after


FREED = {"replaced", "replaced_in_place_of_the_freed", "cast", "tied", "without_a_bias", "inference_memory"}
FREED |= {"another module", "one module less", "said by refresh"}


@pytest.mark.parametrize("change", CHANGES)
def test_memory_that_may_be_gone_is_seen_before_the_look(change):
    """All other changes leave what was recorded something to read."""
    model = Two()
    watch = Watch(model)
    assert watch.lies() is None, "nothing has been looked at"
    before = watch.look()
    assert watch.lies() == before
    CHANGES[change](model)
    gc.collect()
    assert watch.lies() == (None if change in FREED else before)
    assert watch.lies() in (None, before), "it is no look"
    after = watch.look()
    assert after != before and watch.lies() == (None if "hook" in change else after)


def test_what_is_replaced_may_be_kept_by_somebody():
    model = Two()
    watch = Watch(model)
    before, kept = watch.look(), model.one.weight
    replaced(model)
    assert watch.lies() == before
    del kept
    assert watch.lies() is None


def test_a_hook_that_went_elsewhere():
    model = Two()
    hook = model.one.register_forward_hook(lambda *_: None)
    watch = Watch(model)
    before = watch.look()
    model.other._forward_hooks.update(model.one._forward_hooks)
    hook.remove()
    assert watch.look() != before


def test_another_forward_of_its_own():
    """Each may lie where the last one lay."""
    model = Two()
    watch, seen = Watch(model), set()
    for _ in range(8):
        model.one.forward = lambda x: x
        seen.add(watch.look())
        del model.one.forward
    assert len(seen) == 8
    assert watch.look() not in seen, "none is another one, too"


def test_what_was_replaced_is_not_kept_alive():
    model = Two()
    watch = Watch(model)
    watch.look()
    old = weakref.ref(model.one.weight), weakref.ref(model.other)
    model.one.weight = nn.Parameter(torch.zeros(3, 3))
    model.other = nn.Identity()
    gc.collect()
    assert old[0]() is None and old[1]() is None


def test_weights_made_under_inference_mode():
    """They count no versions; all else is seen."""
    with torch.inference_mode():
        model = Two()
    watch = Watch(model)
    before = watch.look()
    assert watch.look() == before
    replaced(model)
    assert watch.look() != before
