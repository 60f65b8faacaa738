"""Checkpoints by name: what transformers loads, and a sentence for what it does not."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsi.ir.errors import DsiError

_POINTER = b"version https://git-lfs"  # what a file begins with that git has not fetched


def pretrained(name: str, dtype: Any) -> tuple[Any, Any]:
    """The model that generates and the tokenizer of the folder or hub id `name`, weights in `dtype` ("auto": as they are stored).

    Raises `DsiError`, a sentence, where there is none, where a file is damaged, or where weights are missing or of other sizes.
    """
    import transformers

    _check_folder(name)
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        both = getattr(config, "is_encoder_decoder", False)
        kind = transformers.AutoModelForSeq2SeqLM if both else transformers.AutoModelForCausalLM
        # Sizes that differ are let through here, since the error of transformers names none.
        model, found = kind.from_pretrained(name, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:  # whatever transformers, or what it reads files with, makes of a checkpoint
        raise DsiError(_why(name, error)) from error
    _check_weights(name, type(model).__name__, found)
    return model, tokenizer


def _check_weights(name: str, kind: str, found: Mapping[str, Any]) -> None:
    if others := sorted(found["mismatched_keys"]):
        key, there, here = others[0]
        raise DsiError(
            f"{name!r}: {key} is {list(there)} in the file and {list(here)} in {kind} as config.json has it ({len(others)} weights differ)"
            ": are configuration and weights of one model?"
        )
    if missing := sorted(found["missing_keys"]):
        longer = next((key for key in sorted(found["unexpected_keys"]) if key.endswith(f".{missing[0]}")), None)
        why = f": it has {longer} instead, as a wrapped model is saved: rename the weights" if longer else ""
        raise DsiError(
            f"{name!r} lacks {len(missing)} weights that {kind} generates with ({missing[0]}, ...), which would be random "
            f"numbers{why or ': give a model that was trained to generate text'}"
        )


def _check_folder(name: str) -> None:
    """Say early what is wrong with a path: the hub's errors speak of ids."""
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise DsiError(f"the folder {name} has no config.json: give one that save_pretrained wrote, or a hub id such as org/model")
    elif path.exists():
        raise DsiError(
            f"{name} is a file; give the folder of a model (with config.json, weights and tokenizer), or a hub id such as org/model"
        )
    elif path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise DsiError(f"there is no folder {name}; give the folder of a model, or a hub id such as org/model")


def _why(name: str, error: Exception) -> str:
    """The sentence for what was raised while `name` was loaded."""
    first = next(iter(str(error).strip().splitlines()), type(error).__name__)
    if Path(name).is_dir():
        return _damage(Path(name)) or f"the model in {name} cannot be loaded to generate text: {first}"
    offline = (
        " HF_HUB_OFFLINE is set, so that only what was fetched before is found." if os.environ.get("HF_HUB_OFFLINE", "0") != "0" else ""
    )
    return f"{name!r} is no folder here, and the hub gave no such model.{offline} transformers says: {first}"


def _damage(folder: Path) -> str | None:
    """Which file of weights cannot be read, if there is one."""
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(str(path), framework="pt"):
                continue
        except Exception as error:
            with path.open("rb") as file:
                if file.read(len(_POINTER)) == _POINTER:
                    return f"{path} is a pointer of git, not the file itself: fetch it (git lfs pull)"
            return f"{path} is damaged ({error}): copy or fetch it again"
    return None
