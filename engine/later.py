"""What of DeepSpeed's call is not there yet, refused before a model is touched."""

from __future__ import annotations

from .config import InferenceConfig


def refuse(config: InferenceConfig) -> None:
    """Raise NotImplementedError, a sentence, for the first thing that `config` asks for and that dsi does not do yet."""
    parallel = config.tensor_parallel
    if parallel.tp_size > 1:
        raise NotImplementedError(
            f"dsi: tensor_parallel={{'tp_size': {parallel.tp_size}}}: splitting a model over GPUs is not there yet; give tp_size 1, "
            "and run one process a GPU for more throughput"
            + (" (injection_policy says what to sum between GPUs, and waits for the same)" if config.injection_policy else "")
        )
    for key in ("mpu", "tp_group"):
        if getattr(parallel, key) is not None:
            raise NotImplementedError(f"dsi: tensor_parallel={{{key!r}: ...}}: process groups of your own come with tensor parallelism")
    for key, given in (
        ("checkpoint", config.checkpoint),
        ("checkpoint_config={'checkpoint_dir': ...}", config.checkpoint_config.checkpoint_dir),
    ):
        if given is not None:
            raise NotImplementedError(
                f"dsi: {key}: reading weights from a checkpoint list is not there yet; load them into the module first "
                "(from_pretrained or load_state_dict)"
            )
    for key, path in (
        ("save_mp_checkpoint_path", config.save_mp_checkpoint_path),
        ("checkpoint_config={'save_mp_checkpoint_path': ...}", config.checkpoint_config.save_mp_checkpoint_path),
    ):
        if path is not None:
            raise NotImplementedError(f"dsi: {key}: writing split weights comes with tensor parallelism; engine.module has them whole")
