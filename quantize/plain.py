"""Whether a module whose class derives from `nn.Linear` computes what a linear does and nothing else: it is asked, by calling it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SCALES = (1e-3, 1.0, 30.0, 1e3)  # of rows: one that clamps what it is given is found out
_NEAR = 32  # roundings of the dtype, relative to a row: a sum in another order, a bias added after rounding


def is_plain(module: nn.Linear) -> bool:
    """Whether `module` holds a weight and a bias alone, and gives x W^T + bias for rows of several sizes, in two and in three dimensions.

    Falcon's linears are such, and so are others that spell a linear otherwise; routers, low-rank adapters and clamps are none.
    """
    if type(module).forward is nn.Linear.forward:
        return _bare(module)
    weight = module._parameters.get("weight")
    if not _bare(module) or weight is None or weight.is_meta or not weight.is_floating_point() or not weight.numel():
        return False
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(_SCALES), 2, weight.shape[1], generator=generator) * torch.tensor(_SCALES)[:, None, None]
    x = rows.to(weight.device, weight.dtype)
    training = module.training
    try:
        with torch.no_grad():
            results = [module.train(False).forward(given) for given in (x, x[:, 0])]
            wanted = F.linear(x, weight, module.bias)
    except Exception:  # whatever it wants, rows of numbers are not it
        return False
    finally:
        module.train(training)
    return all(_near(result, expected) for result, expected in zip(results, (wanted, wanted[:, 0]), strict=True))


def _bare(module: nn.Linear) -> bool:
    held = {*module._parameters, *module._buffers}
    return held == {"weight", "bias"} and not any(module.children())


def _near(result: object, wanted: Tensor) -> bool:
    if not isinstance(result, Tensor) or result.shape != wanted.shape or result.dtype != wanted.dtype:
        return False
    wide, exact = result.double(), wanted.double()
    return bool(((wide - exact).norm(dim=-1) <= _NEAR * torch.finfo(wanted.dtype).eps * exact.norm(dim=-1)).all())
