"""The commands of `python -m bench` that check, draw, compare with DeepSpeed, and run the others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from bench.cli import (
    Against,
    Batches,
    Blocks,
    Cases,
    Dtype,
    FewLayers,
    Json,
    Layers,
    Limit,
    Live,
    Room,
    Seconds,
    Small,
    listed,
    models,
    numbers,
    settings,
    steps_fit,
    table_of_defaults,
    writable,
)

HEADS = {768: 12, 1600: 25, 4096: 32, 64: 4}
LAYERS = {768: 12, 1600: 12, 4096: 8, 64: 2}


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    for name, command in (
        ("all", all_command),
        ("plot", plot_command),
        ("repeat", repeat_command),
        ("sanitize", sanitize_command),
        ("deepspeed", deepspeed_command),
        ("memory", memory_command),
        ("audit", audit_command),
        ("timeline", timeline_command),
        ("in-model", in_model_command),
        ("bytes", bytes_command),
    ):
        app.command(name)(command)


def all_command(
    seconds: Annotated[float, typer.Option(min=0, help="Seconds that all of it may take.")] = 570.0,
    out: Annotated[Path, typer.Option(help="Folder for results.json, log.txt and roofline.svg.")] = Path("out/bench"),
    rows: Annotated[str, typer.Option(help="Rows, by commas, in that order; left out: all, the most important first.")] = "",
    sides: Annotated[str, typer.Option(help="own (each row's), ours, quick, tuned or slow; or sides, by commas.")] = "own",
    small: Small = False,
    show: Annotated[bool, typer.Option("--list", help="Print the rows and what each takes, and run nothing.")] = False,
) -> None:
    """The benchmarks in order of importance within a time, each in a process of its own."""
    from bench.everything import FILES, Everything
    from bench.rows import SETS, chosen, listing
    from bench.sides import sides_of

    try:
        asked = chosen(rows)
        if named := SETS.get(sides, sides):
            sides_of(named)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if show:
        listing(sides, asked)
        return
    for name in FILES:
        writable(out / name, "--out")
    if not Everything(seconds, out, sides, small).run(asked):
        raise typer.Exit(1)


def plot_command(
    files: Annotated[list[Path], typer.Argument(help="Files that --json has written, or results.json of `all`.")],
    out: Annotated[Path, typer.Option(help="The picture: .svg, or with matplotlib .png.")] = Path("roofline.svg"),
    sides: Annotated[str, typer.Option(help="The sides to draw, comma-separated; left out: all.")] = "",
) -> None:
    """The share of the roofline by model, batch and side, as a picture."""
    from bench import plot

    try:
        plot.draw(files, out, listed(sides))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    typer.echo(str(out))


def repeat_command(
    cases: Cases = "gpt2,llama-3-8b",
    batches: Batches = "1,16",
    layers: Layers = None,
    runs: Annotated[int, typer.Option(min=1, help="Steps that are compared with the first.")] = 1000,
    against: Against = "dsi,dsi-reduce-overhead",
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
) -> None:
    """Whether a decode step gives the same bits every time, with other work on the chip."""
    from bench import repeat

    shared = settings(against, 1, dtype, small, budget, json)
    room, count = (48, min(runs, 8)) if small else (512, runs)
    if not repeat.good(repeat.run(shared, models(cases, decoders=True), numbers(batches), layers, room, count)):
        raise typer.Exit(1)


def sanitize_command(
    cases: Cases = "gpt2,llama-3.2-1b",
    batches: Batches = "1",
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Annotated[float, typer.Option(min=0.01, help="Seconds that one process may take.")] = 240.0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """One layer of GPT-2 and one of Llama under compute-sanitizer's memcheck."""
    from bench import sanitize

    shared = settings("dsi", 1, dtype, small, budget, json)
    if child is not None:
        sanitize.one_layer(shared, child, numbers(batches)[0])
    elif not sanitize.good(sanitize.run(shared, models(cases, decoders=True), numbers(batches), limit)):
        raise typer.Exit(1)


def deepspeed_command(
    width: Annotated[int, typer.Option(help=f"Hidden size: {', '.join(map(str, HEADS))}; one a process.")] = 768,
    layers: Layers = None,
    live: Annotated[int, typer.Option(min=2, help="Tokens in the cache when a step begins.")] = 502,
    room: Room = 512,
    against: Against = "eager,reduce-overhead,dsi,dsi-laid-out,deepspeed",
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """A step through GPT-2's layers by DeepSpeed's fused layers beside dsi and torch.compile."""
    from bench import deepspeed_side

    if small:
        width, live, room = 64, min(live, 20), min(room, 32)
    if width not in HEADS:
        raise typer.BadParameter(f"no number of heads is known for the width {width}; known: {', '.join(map(str, HEADS))}")
    steps_fit([], room, [live])
    shared = settings(against, blocks, dtype, small, budget, json, limit)
    deepspeed_side.run(shared, deepspeed_side.Sizes(width, HEADS[width], layers or LAYERS[width], room, live))


def timeline_command(
    cases: Cases = "gpt2",
    batches: Batches = "1",
    layers: Layers = None,
    cache: Room = 512,
    live: Live = 128,
    against: Against = "dsi,dsi-laid-out,reduce-overhead",
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """What each kernel of a decode step costs, from its start to the next one's."""
    from bench import timeline

    shared = settings(against, 1, dtype, small, budget, json, limit)
    if small:
        cache, live = 32, min(live, 20)
    named = models(cases)
    steps_fit(named, cache, [live])
    timeline.run(shared, named, numbers(batches), layers, cache, live)


def bytes_command(
    cases: Cases = "llama-3-8b",
    batches: Batches = "1,8",
    layers: FewLayers = 4,
    cache: Room = 512,
    live: Live = 128,
    against: Against = "dsi-int8",
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    metrics: Annotated[str, typer.Option(help="What ncu counts besides, by commas.")] = "",
    limit: Annotated[float, typer.Option(min=0.01, help="Seconds that one process may take.")] = 120.0,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """What a decode step reads from memory, as Nsight Compute counts it, beside what it must."""
    from bench import bytes_read

    shared = settings(against, 1, dtype, small, budget, json)
    if small:
        cache, live = 32, min(live, 20)
    if child is not None:
        bytes_read.one_step(shared, child, numbers(batches)[0], layers, cache, live)
    else:
        named = models(cases)
        steps_fit(named, cache, [live])
        bytes_read.run(shared, named, numbers(batches), layers, cache, live, limit, listed(metrics))


def in_model_command(
    cases: Cases = "llama-3-8b",
    batches: Batches = "4",
    layers: FewLayers = 4,
    cache: Room = 512,
    live: Live = 128,
    against: Against = "dsi",
    most: Annotated[int, typer.Option(min=0, help="Choices of the cost model's list that are tried in each group.")] = 8,
    choice: Annotated[
        list[str] | None, typer.Option(help="Fields, 'peel=first|last,num_warps=4' (| tries each), or of some groups, 'TITLE: peel=first'.")
    ] = None,
    groups: Annotated[str, typer.Option(help="Parts of the titles of groups to try choices in, by commas; left out: all.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Times that all groups are gone through.")] = 2,
    defaults: Annotated[
        Path | None,
        typer.Option(help="File in the form of codegen/defaults.json that gets winners; attention's go to attention_FILE beside it."),
    ] = None,
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """Choices of kernels tried where they run: kept where the whole step is faster."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    from bench import in_model
    from bench.linear import parse_choices

    shared = settings(against, blocks, dtype, small, budget, json, limit)
    if foreign := [side for side in shared.against if not (in_model.SIDES[side].backend == "dsi" and in_model.SIDES[side].captures)]:
        raise typer.BadParameter(f"choices are tried in dsi, dsi-int8 or dsi-laid-out, not in {', '.join(foreign)}")
    if small:
        cache, live = 32, min(live, 20)
    try:
        split = [text.rpartition(":") for text in choice or ()]
        wanted = [(part.strip(), fields) for part, _, text in split for fields in parse_choices(text)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    named = models(cases)
    steps_fit(named, cache, [live])
    from dsi.codegen.defaults import read

    table_of_defaults(defaults, read)
    plan = in_model.Plan(wanted, most, listed(groups), rounds, defaults)
    in_model.run(shared, named, numbers(batches), layers, cache, live, plan)


def memory_command(
    cases: Cases = "llama-3-8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of each model; left out: all.")] = None,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
) -> None:
    """Bytes that the engine holds, in the model's dtype and with int8 weights."""
    from bench import engine_memory

    shared = settings("dsi", 1, dtype, small, budget, json)
    if not engine_memory.good(engine_memory.run(shared, models(cases, decoders=True), layers)):
        raise typer.Exit(1)


def audit_command(
    cases: Cases = "gpt2,gpt2-xl,llama-3.2-1b,llama-7b,llama-3-8b,bert-large",
    batches: Batches = "1",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens a sequence that a pass is given; an encoder gets 128 at least.")] = 1,
    cache: Room = 512,
    int8: Annotated[bool, typer.Option("--int8", help="With int8 weights.")] = False,
    lay_out: Annotated[bool, typer.Option("--lay-out", help="With weights laid out by output, as the engine has them.")] = False,
    device: Annotated[str, typer.Option(help="The device to compile for (codegen/devices.py).")] = "H200",
    json: Json = None,
) -> None:
    """The kernels that models get untuned: registers, spills, shared memory, loads, programs. Needs no GPU."""
    from bench import audit, path
    from bench.shapes import SHAPES

    path.backend()  # so that the package is found
    from dsi.codegen.devices import DEVICES, SMALLER

    known = (*DEVICES, *(smaller.name for smaller in SMALLER.values()))
    if not any(name in device for name in known):
        raise typer.BadParameter(f"unknown device {device!r}; known: {', '.join(known)}")
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        raise typer.BadParameter("TRITON_INTERPRET is set: Triton's interpreter compiles nothing; unset it")
    shared = settings("dsi", 1, None, False, None, json)
    asked = [
        audit.Model(name, batch, max(tokens, 128) if SHAPES[name].family == "bert" else tokens, cache, int8, lay_out)
        for name in models(cases)
        for batch in numbers(batches)
    ]
    if not audit.good(audit.run(shared, asked, device)):
        raise typer.Exit(1)
