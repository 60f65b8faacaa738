"""Run as a script with TRITON_INTERPRET=1: the worked example's kernel, run by Triton's interpreter, against the rule's own pattern."""

import sys
from pathlib import Path

import torch
from dsi.patterns import verify as verification

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import peaknet

print(verification.verify(peaknet.PeakNormRule, kernels=True))

for rows, columns in ((1, 1), (3, 5), (2, 128), (7, 257)):
    x, weight = torch.randn(rows, columns), torch.randn(columns)
    for given in (x, x.t().contiguous().t()):
        torch.testing.assert_close(peaknet.peak_norm_launch(given, weight, 1e-5), peaknet.peak_norm_reference(x, weight, 1e-5))

# A kernel that is wrong must be found out.
launch = peaknet.peak_norm.kernel
object.__setattr__(peaknet.peak_norm, "kernel", lambda x, weight, eps: launch(x, weight, 2 * eps + 0.01))
try:
    verification.verify(peaknet.PeakNormRule, kernels=True)
except verification.VerificationError as error:
    print("refused:", error)
else:
    raise AssertionError("a wrong kernel was taken")
