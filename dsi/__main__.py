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
        explanation = explain_model(module, *args, options={"dump": dump} if dump else None, **kwargs)
        _console().print(explanation)
        if html is not None:
            explanation.html(html, title=model.resolve().parent.name if model.name == "config.json" else model.stem)
            typer.echo(f"Page: {html}")
    except DsiError as error:
        typer.echo(f"dsi: {error}", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        if model.suffix == ".py":
            raise  # the file's own, or a bug: the trace says where
        words = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        typer.echo(
            f"dsi: the model of {model} does not run on token ids alone ({words}); "
            "write a Python file with a function example() that returns (model, args, kwargs)",
            err=True,
        )
        raise typer.Exit(1) from None


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

    if not (path / "config.json").is_file() and not (path.is_file() and path.suffix == ".json"):
        raise DsiError(f"{path} is neither a Python file, nor a config.json, nor a folder with one")
    try:
        import torch
        import transformers
    except ImportError as error:
        raise DsiError(f"a Hugging Face model needs transformers: pip install 'dsi[hf]' ({error})") from None
    config = transformers.AutoConfig.from_pretrained(path)
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
