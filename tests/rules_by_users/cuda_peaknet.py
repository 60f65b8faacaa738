"""Run as a script on a machine with a CUDA device: the worked example there, its kernel against the rule's pattern and in a model."""

import functools
import sys
from pathlib import Path

import torch
from dsi.compiler.backend import dsi as backend

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import peaknet

import dsi

print(dsi.verify(peaknet.PeakNormRule, kernels=True))
torch.manual_seed(0)
model, ids = peaknet.PeakNet().eval().cuda(), torch.randint(0, 211, (2, 12), device="cuda")
for dtype, bound in ((torch.float32, 1e-4), (torch.bfloat16, 5e-2)):
    model = model.to(dtype)
    torch.compiler.reset()
    with torch.no_grad():
        # By the function, so that it runs from a source tree that is not installed as well.
        compiled = torch.compile(model, backend=functools.partial(backend, options={"rules": peaknet.RULES, "library": False}))
        compiled(ids)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            logits = compiled(ids)
        error = ((logits - model(ids)).abs().max() / model(ids).abs().max()).item()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    print(dtype, "relative error", error, "kernels", len(names), "of them peak_norm_kernel", names.count("peak_norm_kernel"))
    assert error < bound and names.count("peak_norm_kernel") == 5, names
