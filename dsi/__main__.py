"""The command line: `dsi` or `python -m dsi`."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="A compiler of transformer models for inference: look into what it does."
)


def _version(wanted: bool) -> None:
    if wanted:
        import dsi

        typer.echo(dsi.__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


@app.command()
def explain(
    model: Annotated[Path, typer.Argument(help="A Python file with a function example(), or a Hugging Face config.json or model folder.")],
    batch: Annotated[int, typer.Option(min=1, help="Rows of the ids that a Hugging Face model is run on.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens in a row.")] = 16,
    html: Annotated[Path | None, typer.Option(help="Also write a page with pictures of the graphs into this file.")] = None,
    dump: Annotated[Path | None, typer.Option(help="Also write the debug dump into this folder.")] = None,
) -> None:
    """Say which rules fire, which regions are made, what they should cost and what is left in a model.

    example() returns (model, args) or (model, args, kwargs); instead of it a file may define `model` and `inputs` (a tuple of arguments or
    a dict of named ones). From a Hugging Face configuration the model is made without weights, so that one of any size can be looked at.
    """
    from dsi.compiler.explain import explain as explain_model
    from dsi.ir.errors import DsiError

    try:
        module, args, kwargs = _from_python(model) if model.suffix == ".py" else _from_config(model, batch, length)
        if "options" in kwargs:
            raise DsiError(f"the model of {model} is given an argument by the name of options, which is dsi's own; pass it by position")
        explanation = explain_model(module, *args, options={"dump": dump} if dump else None, **kwargs)
        _console().print(explanation)
        if html is not None:
            title = model.resolve().parent.name if model.name == "config.json" else model.stem
            try:
                explanation.html(html, title=title)
            except OSError as error:
                raise DsiError(f"the page cannot be written to {html}: {error.strerror}") from None
            typer.echo(f"Page: {html}")
    except DsiError as error:
        typer.echo(f"dsi: {error}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        if model.suffix == ".py":
            raise  # the file's own, or a bug: the trace says where
        words = _words(getattr(error, "inner_exception", error))  # Dynamo's own begins with a line that says nothing
        typer.echo(
            f"dsi: the model of {model} does not run on token ids alone ({words}); "
            "write a Python file with a function example() that returns (model, args, kwargs)",
            err=True,
        )
        raise typer.Exit(1) from None


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="A folder with a Hugging Face model and its tokenizer, or a hub id such as org/model.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1, help="Stop after so many tokens at the latest.")] = 128,
    temperature: Annotated[float | None, typer.Option(min=0.0, help="Draw tokens at this temperature; 0 is greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Draw among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw among the likeliest tokens that add up to p.")] = None,
    min_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw among tokens at least p times as likely as the best.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Make what was said less likely (above 1).")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of what is drawn.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16 or int8. auto: the checkpoint's on a GPU, fp32 on a CPU.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N. Left out: a GPU where there is one.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message: use the tokenizer's chat template.")] = False,
    eager: Annotated[bool, typer.Option("--eager", help="Compile nothing, to compare.")] = False,
) -> None:
    """Continue a text with a Hugging Face model, compiled; greedily, unless an option says how to draw. It goes to standard output."""
    from rich.console import Console

    from dsi.engine import text
    from dsi.engine.dtypes import dtype_of
    from dsi.ir.errors import DsiError

    notes = Console(stderr=True, highlight=False)
    drawn: dict[str, Any] = {} if temperature == 0 else dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = text.Sampling(**drawn, repetition_penalty=repetition_penalty, seed=seed)
    try:
        with notes.status(f"loading {model}"):
            loaded, tokenizer = text.load(model, dtype, device)
        made = text.stream(
            *(loaded, tokenizer, sys.stdin.read() if prompt == "-" else prompt, lambda part: typer.echo(part, nl=False)),
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            chat=chat,
            compiled=not eager,
            dtype=None if dtype == "auto" else dtype_of(dtype),
        )
    except (DsiError, NotImplementedError) as error:
        typer.echo(f"dsi: {str(error).removeprefix('dsi: ')}", err=True)
        raise typer.Exit(1) from None
    typer.echo()
    notes.print(f"[dim]{made}[/dim]")


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _console() -> Any:
    from rich.console import Console

    # A file or a pipe has no width: nothing is wrapped there.
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _from_python(path: Path) -> tuple[Any, tuple, dict[str, Any]]:
    from dsi.ir.errors import DsiError

    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise DsiError(f"there is no Python file {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))  # as Python does with a script: what lies beside it can be imported
    spec.loader.exec_module(module)
    example = getattr(module, "example", None)
    if not callable(example):
        given, inputs = getattr(module, "model", None), getattr(module, "inputs", None)
        if callable(given) and isinstance(inputs, dict):
            return given, (), inputs
        if callable(given) and isinstance(inputs, (tuple, list)):
            return given, tuple(inputs), {}
        raise DsiError(
            f"{path} has no function example() that returns (model, args) or (model, args, kwargs), and no `model` with `inputs` "
            "(a tuple of arguments or a dict of named ones)"
        )
    made = example()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise DsiError(f"example() of {path} returned {type(made).__name__}; it must return (model, args) or (model, args, kwargs)")
    module_, args, *rest = made
    return module_, tuple(args), dict(rest[0]) if rest else {}


def _from_config(path: Path, batch: int, length: int) -> tuple[Any, tuple, dict[str, Any]]:
    from dsi.ir.errors import DsiError

    if not path.exists():
        raise DsiError(f"there is no file or folder {path}")
    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".json"):
        raise DsiError(f"{path} is neither a Python file, nor a config.json, nor a folder with one")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise DsiError(f"a Hugging Face model needs transformers: pip install 'dsi[hf]' ({error})") from None
    try:
        config = transformers.AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise DsiError(f"transformers makes no configuration of {path} ({_words(error)})") from None
    both = getattr(config, "is_encoder_decoder", False)
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping and not both
    named = next((cls for name in config.architectures or () if (cls := getattr(transformers, name, None)) is not None), None)
    with torch.device("meta"):
        if named is not None:
            model = named._from_config(config)
        else:
            model = (transformers.AutoModelForCausalLM if causal else transformers.AutoModel).from_config(config)
        ids = torch.zeros((batch, length), dtype=torch.long)
    given: dict[str, Any] = {"input_ids": ids}
    if both:
        given["decoder_input_ids"] = ids
    if "use_cache" in inspect.signature(model.forward).parameters or causal or both:
        # A cache of nothing is a real tensor, which the meta device cannot join.
        given["use_cache"] = False
    return model.eval(), (), given


def main() -> None:
    """Entry point of the `dsi` command."""
    app()


if __name__ == "__main__":
    main()
