"""Recorded graphs: keyed by sizes and addresses, results that stay, caches written once; with a stand-in recorder, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from dsi.compiler.observe import collecting
from dsi.ir.context import Context
from dsi.ir.options import Options
from dsi.runtime import graphs, recorded
from dsi.runtime.cuda import generated_kernels, why_not_worth_it
from dsi.runtime.graphs import ALLOCATION, COPY, REPLAY, GraphedProgram, launching_costs, replay_costs
from dsi.runtime.program import ReferenceKernel, build, no_kernels, reference_kernels
from lowered_graphs import D, Outer, decode_layer, eager_layer, layer_inputs


class Stand:
    """Records by running, and puts back what the run wrote to; a replay runs again into the same results."""

    def __init__(self, tensors):
        self.tensors, self.recording, self.recorded, self.where = tensors, True, 0, 0

    def place(self):
        return self.where

    def may_record(self):
        return self.recording

    def record(self, run, place):
        before = [tensor.clone() for tensor in self.tensors()]
        results = run()
        for tensor, old in zip(self.tensors(), before, strict=True):
            tensor.copy_(old)
        self.recorded += 1

        def replay():
            for old, new in zip(results, run(), strict=True):
                if isinstance(old, torch.Tensor) and old is not new:
                    old.copy_(new)

        return replay, results


def graphed(inputs, static=(), dynamic=()):
    """A decode layer behind a stand-in recorder; `inputs` names the tensors of the next call."""
    outer, gm = decode_layer(inputs, dynamic)
    names = list(inputs)
    context = Context(Options())
    current = dict(inputs)
    recorder = Stand(lambda: list(current.values()))
    run = GraphedProgram(
        build(gm, outer.fakes, reference_kernels),
        outer.fakes,
        [names.index(n) for n in static],
        graphs.written_inputs(gm),
        context,
        recorder,
    )

    def call(tensors):
        current.clear()
        current.update(tensors)
        return run(list(tensors.values()))

    return call, run, recorder


def check(call, tensors):
    expected = {name: value.clone() for name, value in tensors.items()}
    result = eager_layer(expected)
    (out,) = call(tensors)
    torch.testing.assert_close(out, result, rtol=1e-5, atol=1e-5)
    for name in tensors:
        torch.testing.assert_close(tensors[name], expected[name], rtol=0, atol=0)
    return out


def test_the_second_call_records_and_later_ones_replay():
    tensors = layer_inputs(2, 1, 32, 5)
    call, run, recorder = graphed(tensors, static=list(tensors)[1:])
    for number in range(5):
        check(call, tensors)
        assert (recorder.recorded, run.launched) == (min(number, 1), number)


def test_what_the_caller_keeps_is_not_overwritten():
    tensors = layer_inputs(2, 1, 32, 5)
    first_name = next(iter(tensors))
    call, _, _ = graphed(tensors, static=list(tensors)[1:])
    kept = []
    for _ in range(4):
        tensors = {**tensors, first_name: torch.randn_like(tensors[first_name])}
        out = check(call, tensors)
        kept.append((out, out.clone()))
    for out, then in kept:
        assert torch.equal(out, then)


def test_another_address_of_a_static_input_is_another_graph():
    tensors = layer_inputs(2, 1, 32, 5)
    call, _, recorder = graphed(tensors, static=list(tensors)[1:])
    for _ in range(3):
        check(call, tensors)
    other = {name: (value.clone() + 0.25 if value.is_floating_point() else value) for name, value in tensors.items()}
    for _ in range(3):
        check(call, other)
    check(call, tensors)  # the first graph is still there, and still right
    assert recorder.recorded == 2


def test_a_cache_is_used_where_it_lies_though_nobody_marked_it_static():
    tensors = layer_inputs(2, 1, 32, 5)
    call, run, recorder = graphed(tensors)
    for _ in range(4):
        check(call, tensors)  # `check` compares every input: the caches are written, once a call
    assert recorder.recorded == 1 and run.launched == 3


def test_sizes_are_part_of_the_key():
    call, run, recorder = graphed(layer_inputs(3, 7, 29, 11), dynamic=(3, 7))
    fresh = [
        layer_inputs(*sizes, 29, position, seed=turn) for turn in range(2) for *sizes, position in [(3, 7, 11), (5, 2, 0), (2, 11, 18)]
    ]
    for tensors in fresh:
        check(call, tensors)
    assert recorder.recorded == 0  # caches of their own in every call, all alive: no address comes again
    kept = [layer_inputs(batch, length, 29, position) for batch, length, position in [(3, 7, 11), (5, 2, 0)]]
    for _ in range(3):
        for tensors in kept:
            check(call, tensors)
    assert recorder.recorded == 2 and run.launched == 4


def test_nothing_is_recorded_while_somebody_else_records():
    tensors = layer_inputs(2, 1, 32, 5)
    call, run, recorder = graphed(tensors)
    recorder.recording = False
    for _ in range(4):
        check(call, tensors)
    assert recorder.recorded == 0 == run.launched


def test_another_stream_is_another_graph():
    tensors = layer_inputs(2, 1, 32, 5)
    call, _, recorder = graphed(tensors)
    for where in (0, 1, 0, 1, 0, 1):
        recorder.where = where
        check(call, tensors)
    assert recorder.recorded == 2


def test_what_cannot_be_recorded_runs_as_it_is_and_is_reported():
    tensors = layer_inputs(2, 1, 32, 5)
    call, run, recorder = graphed(tensors)

    def fails(run, place):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    recorder.record = fails
    for _ in range(4):
        check(call, tensors)
    assert run.launched == 0
    assert run._context.report.notes == [
        "no CUDA graph could be recorded, so every kernel is launched by itself: operation not permitted when stream is capturing"
    ]


def test_layers_that_share_a_program_are_found_by_turns_in_any_order():
    """One look where they follow each other as they did the last time, a look-up by key where they do not."""
    sets = [layer_inputs(2, 1, 32, 5, seed=seed) for seed in range(20)]
    call, run, recorder = graphed(sets[0], static=list(sets[0])[1:])
    sought, find = [], run._find
    run._find = lambda *given: sought.append(1) or find(*given)
    for turn in range(5):
        for tensors in sets:
            check(call, tensors)
        assert recorder.recorded == (len(sets) if turn else 0)
    assert len(sought) == 2 * len(sets) + 1  # seen, recorded, and the first one behind the last
    for number in (3, 17, 3, 4, 0):
        check(call, sets[number])
    assert recorder.recorded == len(sets) and run.launched == 3 * len(sets) + len(sets) + 5


def test_a_weight_replaced_among_many_is_noticed():
    sets = [layer_inputs(2, 1, 32, 5, seed=seed) for seed in range(3)]
    names = list(sets[0])
    call, _, recorder = graphed(sets[0], static=names[1:])
    for _ in range(3):
        for tensors in sets:
            check(call, tensors)
    weight = next(name for name in names[1:] if sets[1][name].is_floating_point() and sets[1][name].dim() == 2)
    sets[1] = {**sets[1], weight: sets[1][weight] * 2}
    for _ in range(3):
        for tensors in sets:
            check(call, tensors)
    assert recorder.recorded == 4


def test_what_is_in_use_stays_where_there_is_no_room_for_all(monkeypatch):
    """Recording one costs as much as many calls: graphs that push each other out would be recorded in each call."""
    monkeypatch.setattr(recorded, "GRAPHS", 2)
    sets = [layer_inputs(2, 1, 32, 5, seed=seed) for seed in range(3)]
    call, run, recorder = graphed(sets[0])
    for _ in range(8):
        for tensors in sets:
            check(call, tensors)
    assert recorder.recorded == 2 == len(run._shelf.graphs) and run.launched == 2 * 7


def test_what_is_no_longer_used_gives_way(monkeypatch):
    monkeypatch.setattr(recorded, "GRAPHS", 2)
    sets = [layer_inputs(2, 1, 32, 5, seed=seed) for seed in range(3)]
    call, run, recorder = graphed(sets[0])
    for tensors in sets:
        for _ in range(9):
            check(call, tensors)
    assert recorder.recorded == 3 and len(run._shelf.graphs) == 2
    check(call, sets[1])
    assert recorder.recorded == 3
    launched = run.launched
    check(call, sets[0])
    assert run.launched == launched  # the first is gone, and nothing that pointed to it serves a call


def test_large_graphs_are_few(monkeypatch):
    monkeypatch.setattr(recorded, "FEW", 1)
    sets = [layer_inputs(2, 1, 32, 5, seed=seed) for seed in range(3)]
    call, run, recorder = graphed(sets[0])
    for _ in range(2):
        check(call, sets[0])
    (graph,) = run._shelf.graphs.values()
    assert graph.size >= sum(value.untyped_storage().nbytes() for value in (*graph._into, *graph._made)) > 0
    monkeypatch.setattr(recorded, "BYTES", 2 * graph.size)
    for _ in range(3):
        for tensors in sets:
            check(call, tensors)
    assert recorder.recorded == 2


def projection():
    outer = Outer()
    nodes = [outer.input("x", torch.zeros(2, 16)), outer.input("w", torch.zeros(8, 16))]
    (y,) = outer.region("project", lambda x, w: (D.linear(x, w),), *nodes)
    outer.plan()
    return outer, outer.finish(y)


@pytest.mark.parametrize("count, worth", [(1, False), (3, False), (4, True), (None, True)])
def test_a_program_that_costs_no_more_than_a_replay_and_its_copies_is_not_recorded(count, worth):
    class Counted(ReferenceKernel):
        launches = count

    outer, gm = projection()
    program = build(gm, outer.fakes, lambda region, *given: Counted(region))
    assert program.launches == [count]
    costs = replay_costs(outer.fakes, [1], [], program.results)
    assert (why_not_worth_it(program, costs) == "") == worth  # one step of so many launches


def test_three_kernels_with_a_copy_in_and_a_copy_out_are_recorded_and_two_are_not():
    costs = replay_costs([torch.zeros(2), torch.zeros(2)], [1], [], [2])
    assert launching_costs([1, 1]) < costs < launching_costs([1, 1, 1])
    assert launching_costs([1, 0, 0]) == launching_costs([1]) and launching_costs([1, None]) is None  # views launch nothing


def test_launches_are_known_of_generated_kernels_and_counted_for_operators():
    outer, gm = projection()
    assert build(gm, outer.fakes, generated_kernels(outer.context(library=False), "cpu")).launches == [1]
    outer, gm = decode_layer(layer_inputs(2, 1, 32, 5))
    program = build(gm, outer.fakes, no_kernels)
    assert program.launches == [1] * len(program.steps) and len(program.steps) > 3


def test_what_a_call_through_a_graph_costs():
    x, w, ids = torch.zeros(2), torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    assert replay_costs([x, w, 3], [1], [], [3]) == REPLAY + 2 * COPY + ALLOCATION
    assert replay_costs([x, x, w, ids], [2], [], [4, 5]) == REPLAY + 3 * COPY + 2 * ALLOCATION  # two dtypes in
    assert replay_costs([w, 3], [0], [], [2]) == REPLAY + COPY + ALLOCATION  # nothing is copied in
    assert replay_costs([x, w, 3], [1], [0], [0, (None,)]) == REPLAY  # nor out


@pytest.mark.parametrize("asked", [False, True])
def test_a_number_that_nothing_depends_on_does_not_tell_calls_apart(asked):
    """Dynamo hands in where in its storage a slice of ids begins, which differs in every step."""
    from torch._dynamo.source import ConstantSource

    outer = Outer()
    shapes = outer.mode.shape_env
    n = outer.size_input("n", shapes.create_symintnode(shapes.create_symbol(5, ConstantSource("n")), hint=5))
    x, w = outer.input("x", torch.randn(2, 8)), outer.input("w", torch.randn(8, 8))
    (y,) = outer.region("linear", lambda n, x, w: (D.linear(x, w) * (n if asked else 1),), n, x, w)
    program = build(outer.finish(y), outer.fakes, reference_kernels)
    assert program.needed == ({0, 1, 2} if asked else {1, 2})
    recorder = Stand(lambda: [])
    run = GraphedProgram(program, outer.fakes, [2], [], Context(Options()), recorder, program.needed)
    weight = torch.randn(8, 8)
    for turn in range(2):
        for number in (5, 6, 7):
            x = torch.randn(2, 8)
            expected = x @ weight.t() * (number if asked else 1)
            torch.testing.assert_close(run([number, x, weight])[0], expected, rtol=1e-5, atol=1e-5)
        assert recorder.recorded == (3 * turn if asked else 1)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_decoding_on_a_gpu_by_graphs(mode):
    """Two caches by turns, a replaced parameter, kept outputs and a changed length: always eager's numbers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=211, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval().cuda()
    ids = torch.randint(3, 211, (2, 7)).cuda()
    with torch.inference_mode(), collecting() as contexts:
        compiled = torch.compile(model, backend="dsi", mode=mode)
        pairs = [[transformers.StaticCache(config=config, max_cache_len=32) for _ in range(2)] for _ in range(2)]
        kept = []
        for step in range(8):
            for ours, theirs in pairs:
                given = ids if step == 0 else ids[:, step % 7][:, None]
                out = compiled(input_ids=given, past_key_values=ours).logits
                expected = model(input_ids=given, past_key_values=theirs).logits
                torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
                kept.append((out, out.clone()))
            if step == 4:
                model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0).contiguous())
        torch.cuda.synchronize()
        assert all(torch.equal(out, then) for out, then in kept)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            compiled(input_ids=ids[:, :1], past_key_values=pairs[0][0])
        assert [event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch"] == [1]
    prompt, *steps = ([note for note in context.report.notes if "every kernel is launched by itself" in note] for context in contexts)
    # transformers makes a cache's length on the host, and moves it to the device while the prompt runs.
    assert all("which is on the cpu" in note for note in prompt)
    assert steps and not any(steps)
