"""DPM-Solver++ for a flow model: the multistep solver of second order, midpoint form (Lu et al., arXiv 2211.01095).

It solves the ODE in the log-SNR lambda = ln((1 - s) / s) for the predicted image x0_hat = x - s v. From s to t, h = lambda_t -
lambda_s, with D0 = x0_hat at s and D1 = (D0 - previous x0_hat) h / h_previous:

    x_t = (t / s) x_s + (1 - t) (1 - exp(-h)) (D0 + D1 / 2)

The first step has no D1 and is the Euler step; the last one, to t = 0, where h is infinite, is D0 itself.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor


def solve(velocity: Callable[[Tensor, int], Tensor], x: Tensor, sigmas: Tensor, visited: tuple[int, ...]) -> Tensor:
    """From x at ``sigmas[visited[0]]`` (below 1) to the image at ``sigmas[visited[-1]]``, which is 0. x: [B, *latent].

    velocity(x, i) is the network's prediction at ``sigmas[i]``; it is asked once for every index but the last.
    """
    log_snr = torch.log((1 - sigmas) / sigmas)
    before: tuple[int, Tensor] | None = None
    for now, then in pairwise(visited):
        s, t = sigmas[now], sigmas[then]
        image = x - s * velocity(x, now)
        if float(t) == 0.0:
            return image
        h = log_snr[then] - log_snr[now]
        target = image
        if before is not None:
            target = image + (image - before[1]) * (h / (log_snr[now] - log_snr[before[0]]) / 2)
        x = (t / s) * x - (1 - t) * torch.expm1(-h) * target
        before = (now, image)
    return x
