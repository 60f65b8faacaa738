"""`python -m bench decode|prefill|regions|linear|attention|compile|…`: speed on this machine beside eager PyTorch and torch.compile."""

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
    Json,
    Layers,
    Limit,
    Room,
    Seconds,
    Small,
    known_ones,
    listed,
    models,
    numbers,
    settings,
    steps_fit,
    table_of_defaults,
)
from bench.commands import register

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)
register(app)


@app.command("decode")
def decode_command(
    cases: Cases = "gpt2,gpt2-xl,llama-3.2-1b,llama-7b,llama-3-8b,bert-large",
    batches: Batches = "1",
    layers: Layers = None,
    cache: Room = 512,
    live: Annotated[str, typer.Option(help="Tokens in the cache when a step begins, by commas; left out: all but a block's.")] = "",
    length: Annotated[int, typer.Option(min=1, help="Tokens of an encoder's input.")] = 128,
    against: Against = "eager,default,reduce-overhead,max-autotune-no-cudagraphs,dsi,dsi-reduce-overhead",
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """One token's step of each decoder over a static cache; one pass of each encoder."""
    from bench import decode

    shared = settings(against, blocks, dtype, small, budget, json, limit)
    lives: list[int | None] = [*numbers(live)] if live else [None]
    if small:
        cache, length = min(cache, 32), min(length, 16)
        lives = [None if tokens is None else min(tokens, 22 - number) for number, tokens in enumerate(lives)]
    named = models(cases)
    steps_fit(named, cache, lives)
    decode.run(shared, named, numbers(batches), layers, cache, lives, length)


@app.command("prefill")
def prefill_command(
    cases: Cases = "llama-3-8b",
    batches: Batches = "1",
    lengths: Annotated[str, typer.Option(help="Prompt lengths, by commas.")] = "512,2048",
    layers: Layers = None,
    against: Against = "eager,default,max-autotune-no-cudagraphs,dsi",
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """The prompt into an empty static cache."""
    from bench import prefill

    shared = settings(against, blocks, dtype, small, budget, json, limit)
    sizes = numbers(lengths)
    prefill.run(shared, models(cases, decoders=True), numbers(batches), [12] if small else sizes, layers)


@app.command("regions")
def regions_command(
    widths: Annotated[str, typer.Option(help="Hidden sizes, by commas: 1600, 4256, 12288.")] = "1600,4256,12288",
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 1024,
    only: Annotated[str, typer.Option(help="Regions, by commas.")] = "qkv,attention,mlp_in,mlp_out",
    against: Against = "eager,default,dsi,dsi-reduce-overhead",
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """The four regions of a GPT layer, each alone, for one token."""
    from bench import gpt_regions as regions

    shared = settings(against, blocks, dtype, small, budget, json, limit)
    sizes = [64] if small else numbers(widths)
    if unknown := [width for width in sizes if width not in regions.HEADS]:
        raise typer.BadParameter(f"no number of heads is known for the widths {unknown}")
    regions.run(shared, sizes, 24 if small else context, known_ones(only, regions.NAMES, "region"))


@app.command("attention")
def attention_command(
    decode: Annotated[str, typer.Option(help="Decode steps: batch x heads x kv heads x head size x cache x live, by commas.")] = "default",
    prefill: Annotated[str, typer.Option(help="Prompts: batch x heads x kv heads x head size x length, by commas.")] = "default",
    against: Against = "eager,dsi",
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Limit = None,
) -> None:
    """Attention alone beside SDPA (which is the side "eager")."""
    from bench import attention

    shared = settings(against, blocks, dtype, small, budget, json, limit)
    toys = ("2x4x2x16x32x9", "1x4x4x16x12") if small else (attention.DECODE, attention.PREFILL)
    texts = [default if given == "default" else given for given, default in zip((decode, prefill), toys, strict=True)]
    try:
        cases = [attention.Case.parse(text) for given in texts for text in listed(given)]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if not cases:
        raise typer.BadParameter("no case is left: neither --decode nor --prefill names one")
    attention.run(shared, cases)


@app.command("linear")
def linear_command(
    shapes: Annotated[str, typer.Option(help="N x K x M (columns, inner, rows), by commas.")] = "default",
    form: Annotated[str, typer.Option(help="What surrounds the product (bench/linear_forms.py: FORMS).")] = "plain",
    cases: Annotated[str, typer.Option("--models", help="Instead of shapes: the linears of models, by commas (bench/shapes.py).")] = "",
    rows: Annotated[str, typer.Option(help="Rows of the models' linears, by commas.")] = "1,4,16,64",
    choice: Annotated[list[str] | None, typer.Option(help="Fields of a choice, 'block_n=8|16,num_warps=4'; | tries each.")] = None,
    sweep: Annotated[bool, typer.Option("--sweep", help="Try what the cost model lists.")] = False,
    most: Annotated[int, typer.Option(min=1, help="Choices of a sweep, for each case.")] = 16,
    best: Annotated[int, typer.Option(min=1, help="Choices that are printed.")] = 5,
    weights: Annotated[str, typer.Option(help="Each case with its own weights, int8 weights, or both: own,int8.")] = "own",
    lay_out: Annotated[bool, typer.Option("--lay-out", help="Models' weights laid out by output, as the engine has them.")] = False,
    defaults: Annotated[Path | None, typer.Option(help="File in the form of codegen/defaults.json that gets the winners.")] = None,
    blocks: Blocks = 5,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
) -> None:
    """Linears' generated kernels beside cuBLAS, weights rotated past the cache; the tool to tune kernels with."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported
    from bench import linear, path
    from bench.comparators import DTYPES

    shared = settings("eager,dsi", blocks, dtype, small, budget, json)
    path.backend()  # so that the package is found
    from dsi.codegen.defaults import read

    table_of_defaults(defaults, read)
    texts = (linear.SMALL if small else linear.SHAPES) if shapes == "default" else shapes
    try:
        wanted = [fields for text in choice or () for fields in linear.parse_choices(text)]
        if cases:
            asked = linear.model_cases(models(cases), numbers(rows), DTYPES[dtype] if dtype else None, lay_out)
        else:
            asked = linear.cases_of(texts, form, DTYPES[dtype or ("fp32" if small else "fp16")])
        asked = linear.with_weights(asked, listed(weights))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    linear.run(shared, asked, linear.Plan(wanted, most if sweep else 0, best, defaults))


@app.command("compile")
def compile_command(
    cases: Cases = "llama-3-8b",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers for dsi's sides.")] = 32,
    others: Annotated[int | None, typer.Option("--compared", min=1, help="Layers with which dsi is compared with other sides.")] = 4,
    cache: Room = 512,
    against: Against = "dsi,default,max-autotune-no-cudagraphs",
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
    limit: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds that one process may take: 150 cold and 75 warm if left out.")
    ] = None,
    child: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Seconds of the first decode step in a new process, with empty caches and with those of the process before."""
    from bench import compile_time

    shared = settings(against, 1, dtype, small, budget, json, limit)
    room = 32 if small else cache
    named = models(cases, decoders=child is None)
    steps_fit(named, room, [None])
    count, compared = (min(number or 2, 2) if small else number for number in (layers, others))
    if child is not None:
        compile_time.first_step(shared, child, named[0], count, room)
    else:
        compile_time.run(shared, named, count, compared, room)


@app.command("generate")
def generate_command(
    cases: Annotated[str, typer.Option(help="Models, by commas: shapes, or smollm2 (the real one). Left out: as the device allows.")] = "",
    against: Annotated[
        str, typer.Option("--against", "--sides", help="Ways to generate, by commas (bench/generation.py).")
    ] = "eager,static,dsi",
    new: Annotated[int, typer.Option(min=2, help="Tokens that are made.")] = 128,
    length: Annotated[int, typer.Option(min=1, help="Tokens of the prompt.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Prompts.")] = 1,
    layers: Layers = None,
    blocks: Blocks = 3,
    dtype: Dtype = None,
    small: Small = False,
    budget: Seconds = None,
    json: Json = None,
) -> None:
    """Text made by the engine beside transformers' generate, eager and with its static cache compiled."""
    from bench import generation

    shared = settings("eager", blocks, dtype, small, budget, json)
    names = cases or ("gpt2,smollm2-135m,llama-3-8b" if shared.device == "cuda" else "gpt2" if small else generation.REAL)
    ways = known_ones(against, generation.SIDES, "way")
    if [name for name in listed(names) if name != generation.REAL] or not listed(names):
        models(",".join(name for name in listed(names) if name != generation.REAL), decoders=True)
    new, length = (min(new, 12), min(length, 9)) if small else (new, length)
    generation.run(shared, listed(names), ways, new, length, batch, layers)


if __name__ == "__main__":
    app()
