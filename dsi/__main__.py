"""The command line: `dsi` or `python -m dsi`."""

from __future__ import annotations

import importlib.util
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
    dump: Annotated[Path | None, typer.Option(help="Also write the debug dump into this folder.")] = None,
) -> None:
    """Say which rules fire, which regions are made and what is left in a model.

    example() returns (model, args) or (model, args, kwargs). From a configuration alone the model is made with random weights.
    """
    from dsi.compiler.explain import explain as explain_model
    from dsi.ir.errors import DsiError

    try:
        module, args, kwargs = _from_python(model) if model.suffix == ".py" else _from_config(model, batch, length)
        typer.echo(str(explain_model(module, *args, options={"dump": dump} if dump else None, **kwargs)))
    except DsiError as error:
        typer.echo(f"dsi: {error}", err=True)
        raise typer.Exit(1) from None


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
        raise DsiError(f"{path} has no function example() that returns (model, args) or (model, args, kwargs)")
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
    causal = type(config) in transformers.AutoModelForCausalLM._model_mapping and not getattr(config, "is_encoder_decoder", False)
    family = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
    weights = path.is_dir() and any(path.glob("*.safetensors"))
    model = family.from_pretrained(path) if weights else family.from_config(config)
    ids = torch.randint(0, config.get_text_config().vocab_size, (batch, length))
    return model.eval(), (), {"input_ids": ids}


def main() -> None:
    """Entry point of the `dsi` command."""
    app()


if __name__ == "__main__":
    main()
