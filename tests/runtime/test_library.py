"""Regions whose kernels are a library's: seen as the call wants them, written where the region's outputs lie."""

from __future__ import annotations

import pytest
import sympy
import torch
from dsi.codegen.kernel import Kernel, LibraryCall, View, Workspace
from dsi.runtime.cache import DiskCache
from dsi.runtime.kernels import KernelSet
from dsi.runtime.launch import GeneratedKernel
from dsi.runtime.program import build
from dsi.runtime.serialise import kernel_from_json, kernel_to_json
from dsi.runtime.sizes import Sizes
from dsi.runtime.trial import at_sizes
from lowered_graphs import D, Outer

ROWS = sympy.Symbol("s0", integer=True, positive=True)


def numbers(*values):
    return tuple(map(sympy.sympify, values))


def kernel(*calls, workspaces=()):
    return Kernel("by_library", "# by a library\n", "digest", calls, None, "library", workspaces)


def generated(made, values, sizes, symbols):
    return GeneratedKernel(KernelSet((made,), ROWS, symbols), values, sizes, DiskCache("test", enabled=False))


def product(rows=ROWS):
    """x [rows, 2 * 8] @ w[4:, :] ^T by way of scratch memory, as [rows, 6] in a wider output."""
    x = View("input", 0, numbers(rows, 16), numbers(16, 1))
    w = View("input", 1, numbers(6, 16), numbers(16, 1), sympy.Integer(64)).transposed
    scratch = View("workspace", 0, numbers(rows, 6), numbers(6, 1))
    return LibraryCall("product", (x, w, scratch)), LibraryCall(
        "product", (scratch, View("input", 2, numbers(6, 6), numbers(6, 1)), View("output", 0, numbers(rows, 6), numbers(6, 1)))
    )


@pytest.mark.parametrize("rows", [3, 5, 1])
def test_products_of_any_number_of_rows(rows):
    outer = Outer(dynamic=(7,))
    nodes = [outer.input("x", torch.randn(7, 16)), outer.input("w", torch.randn(10, 16)), outer.input("m", torch.randn(6, 6))]
    (y,) = outer.region("region", lambda x, w, m: (D.linear(D.linear(x, w[4:]), m),), *nodes)
    gm = outer.finish(y)
    made = kernel(*product(), workspaces=(Workspace(ROWS * 6, "float32"),))
    runs = []

    def kernels(region, values, sizes, overlaps):
        runs.append(generated(made, values, sizes, {"s0": ("size", 0, 0, 1)}))
        return runs[-1]

    program = build(gm, outer.fakes, kernels)
    x, w, m = torch.randn(rows, 16), torch.randn(10, 16), torch.randn(6, 6)
    (found,) = program([x, w, m])
    torch.testing.assert_close(found, x @ w[4:].t() @ m)
    assert runs[0].describe().count("library product") == 2
    assert runs[0].compile([torch.float32] * 3, [torch.float32], (rows,)) == []


@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_grouped_heads(causal):
    def heads(number):
        # [batch, tokens, heads, channels] as a projection leaves them, seen by heads
        return View("input", 0 if number == 4 else 1, numbers(2, number, 5, 8), numbers(5 * number * 8, 8, number * 8, 1))

    made = View("output", 0, numbers(2, 4, 5, 8), numbers(5 * 32, 8, 32, 1))
    call = LibraryCall("attention", (heads(4), heads(2), heads(2), made), {"scale": 0.3, "causal": causal, "grouped": True})
    q, kv, out = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.zeros(2, 5, 32)
    run = generated(kernel(call), [q, kv], Sizes(()), {"s0": ("size", 0, 1, 1)})
    run([q, kv], [out], ())
    k = kv.transpose(1, 2).repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, k, is_causal=causal, scale=0.3)
    torch.testing.assert_close(out, expected.transpose(1, 2).reshape(2, 5, 32))


def test_a_tensor_that_begins_within_its_storage_is_seen_from_there():
    base = torch.randn(4 * 16 + 3)
    x, w, out = base[3:].view(4, 16), torch.randn(16, 6), torch.zeros(4, 6)
    operands = (
        View("input", 0, numbers(4, 16), numbers(16, 1)),
        View("input", 1, numbers(16, 6), numbers(6, 1)),
        View("output", 0, numbers(4, 6), numbers(6, 1)),
    )
    generated(kernel(LibraryCall("product", operands)), [x, w], Sizes(()), {"s0": ("size", 0, 0, 1)})([x, w], [out], ())
    torch.testing.assert_close(out, x @ w)


def test_calls_are_kept_on_disk_as_they_are():
    made = kernel(*product(), workspaces=(Workspace(ROWS * 6, "float32"),))
    assert kernel_from_json(kernel_to_json(made), made.source) == made
    value = kernel_to_json(made)
    value["launches"][0]["function"] = "os.system"
    with pytest.raises(ValueError, match=r"os\.system"):
        kernel_from_json(value, made.source)


def test_calls_at_given_sizes():
    fixed = at_sizes(kernel(*product(), workspaces=(Workspace(ROWS * 6, "float32"),)), {ROWS: 9})
    first, second = fixed.launches
    assert first.operands[0].sizes == (9, 16) and second.operands[2].sizes == (9, 6) and fixed.workspaces[0].size == 54
