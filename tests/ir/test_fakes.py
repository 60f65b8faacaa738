"""Fakes that are remembered are those that the operators give, and nothing is remembered that could differ."""

import pytest
import torch
from dsi.ir import ops
from dsi.ir.fakes import Fakes, makes_one
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten


class Asked:
    """Asks for results, and counts how often an operator had to be run for one."""

    def __init__(self, mode=None):
        self.mode, self.fakes, self.runs = mode or FakeTensorMode(), Fakes(), 0

    def __call__(self, target, *args, **kwargs):
        def compute():
            self.runs += 1
            with self.mode, torch.no_grad():
                return target(*args, **kwargs)

        return self.fakes.result(target, args, kwargs, compute)

    def tensor(self, *shape, **kwargs):
        with self.mode:
            return torch.empty(shape, **kwargs)


def same(a, b):
    assert type(a) is type(b) is FakeTensor and a is not b and a.fake_mode is b.fake_mode
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf"):
        assert getattr(a, name) == getattr(b, name), name
    assert a.stride() == b.stride() and a.storage_offset() == b.storage_offset() and a._is_view() == b._is_view()
    assert a.untyped_storage().nbytes() == b.untyped_storage().nbytes()
    assert a.untyped_storage()._cdata != b.untyped_storage()._cdata


CALLS = {
    "add": lambda t: (aten.add.Tensor, t(2, 3, 4), t(3, 4)),
    "of another dtype": lambda t: (aten.mul.Tensor, t(2, 3, dtype=torch.bfloat16), t(2, 3, dtype=torch.float64)),
    "of a transposed one": lambda t: (aten.silu.default, t(5, 7).t()),
    "of a slice": lambda t: (aten.add.Tensor, t(5, 8)[:, 2:5], 1.5),
    "of an expanded one": lambda t: (aten.neg.default, t(5, 1).expand(5, 6)),
    "to another device": lambda t: (aten._to_copy.default, t(3, 4)),
    "of parameters": lambda t: (aten.pow.Tensor_Scalar, t(3, 4, requires_grad=True), 2),
    "lists": lambda t: (aten.cat.default, [t(2, 3), t(2, 5)], 1),
    "reduction": lambda t: (aten.mean.dim, t(4, 6), [-1], True),
    "written copy": lambda t: (aten.index_copy.default, t(2, 9, 4), 1, t(1, dtype=torch.int64), t(2, 1, 4)),
    "linear": lambda t: (ops.linear, t(2, 1, 8, dtype=torch.float16), t(5, 8, dtype=torch.float16), None),
    "channels last": lambda t: (aten.relu.default, t(2, 3, 4, 5).to(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_remembered_is_what_the_operator_gives(call):
    asked = Asked()
    kwargs = {"dtype": torch.float16, "device": torch.device("meta")} if call is CALLS["to another device"] else {}
    with asked.mode:
        target, *args = call(asked.tensor)
        _, *others = call(asked.tensor)
    first, second = asked(target, *args, **kwargs), asked(target, *others, **kwargs)
    assert asked.runs == 1
    same(first, second)


def test_what_decides_the_result_tells_calls_apart():
    asked = Asked()
    x = asked.tensor(3, 4, dtype=torch.int64)
    for number, dtype in ((2, torch.int64), (2.0, torch.float32), (True, torch.int64)):
        assert asked(aten.mul.Tensor, x, number).dtype == dtype
    assert asked(aten.sum.dim_IntList, x, [0]).shape == (4,)
    assert asked(aten.sum.dim_IntList, x, [0], True).shape == (1, 4)
    assert asked(aten.sum.dim_IntList, x, [1]).shape == (3,)
    assert asked(aten.sum.dim_IntList, x, [0], dtype=torch.float32).dtype == torch.float32
    assert asked(aten.sum.dim_IntList, asked.tensor(4, 3, dtype=torch.int64), [0]).shape == (3,)
    assert asked(aten.neg.default, asked.tensor(3, 4)).stride() == (4, 1)
    assert asked(aten.neg.default, asked.tensor(4, 3).t()).stride() == (1, 3)
    assert asked(aten.neg.default, asked.tensor(3, 4, device="meta")).device.type == "meta"


def test_views_show_the_memory_of_their_own_argument():
    asked = Asked()
    for x in (asked.tensor(2, 6), asked.tensor(2, 6)):
        for target, *args in (
            (aten.view.default, [3, 4]),
            (aten.reshape.default, [12]),
            (aten.contiguous.default,),
            (aten._unsafe_view.default, [12]),
        ):
            assert asked(target, x, *args).untyped_storage()._cdata == x.untyped_storage()._cdata, target


def test_numbers_in_disguise_and_sizes_that_may_change_are_asked_again():
    asked = Asked(FakeTensorMode(shape_env=ShapeEnv()))
    x, scalar = asked.tensor(3, 4, dtype=torch.float16), asked.tensor(dtype=torch.float32)
    moving = asked.mode.from_tensor(torch.empty(5, 6), static_shapes=False)
    assert moving._has_symbolic_sizes_strides
    for args in ((x, scalar), (moving, 2.0)):
        before = asked.runs
        for _ in range(2):
            asked(aten.mul.Tensor, *args)
        assert asked.runs == before + 2


def test_an_error_is_an_error_each_time():
    asked = Asked()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            asked(aten.mm.default, asked.tensor(2, 3), asked.tensor(2, 3))
    assert asked.runs == 2


@pytest.mark.parametrize(
    "target",
    [aten.add_.Tensor, aten.add.out, aten.view.default, aten.bernoulli.default, aten.nonzero.default, aten.split.Tensor, aten.topk.default,
     aten.sym_size.int, aten.item.default, torch.add, len],
)  # fmt: skip
def test_only_operators_that_make_one_tensor_are_remembered(target):
    assert not makes_one(target)
    assert makes_one(aten.add.Tensor)
