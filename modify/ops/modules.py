"""The modules that a conversion inserts: routers, gates, predictors and bypasses.

All but bypasses compute in float32 under any autocast.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Router(nn.Module):
    """One scalar per token: a linear projection of the block's normalised input (section 3.4 of the paper).

    The paper projects the residual stream itself, in a model trained from scratch. In a pretrained one its scale grows
    by orders of magnitude along the blocks (SmolLM2: scores of standard deviation 3 to 140), so that `tanh` and
    `sigmoid` saturate, no gradient reaches the router, and raw scores are no gate. Normalised, scores start at about 1.

    Maps hidden states `[B, S, D]` to scores `[B, S]` in float32.
    """

    def __init__(self, hidden_size: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the weights from N(0, 1/D), so that the first routing is arbitrary but reproducible."""
        with torch.no_grad():
            noise = torch.randn(self.weight.shape, generator=generator)
            self.weight.copy_(noise * self.weight.numel() ** -0.5)
            self.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            # Rows: a runtime that shared half of the norm with the block's own would not fuse either.
            x = hidden.float().flatten(0, 1)
            x = functional.rms_norm(x, x.shape[-1:], eps=1e-6)
            scores = functional.linear(x, self.weight.float().unsqueeze(0))
            return scores.view(hidden.shape[:-1]) + self.bias.float()


class RandomRouter(nn.Module):
    """Gaussian noise for scores: the paper's stochastic control (section 4.1). `[B, S, D]` to `[B, S]`."""

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Nothing to draw: the noise comes from torch's global generator at every call."""

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.randn(hidden.shape[:2], device=hidden.device)


class Gate(nn.Module):
    """What multiplies a block's update, from the scores of the selected tokens.

    `tanh`: `1 + alpha * tanh(r)`, `alpha` a parameter that starts at 0: the block's own output until training moves it.
    `linear`: `r`, equation 1 of the paper. `sigmoid`: `sigmoid(r)`.

    Maps scores `[B, k]` to `[B, k, 1]` in float32.
    """

    def __init__(self, kind: str, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.kind = kind
        if kind == "tanh":
            self.alpha = nn.Parameter(torch.zeros((), device=device))

    def forward(self, scores: Tensor) -> Tensor:
        scores = scores.float().unsqueeze(-1)
        if self.kind == "tanh":
            return 1 + self.alpha.float() * scores.tanh()
        return scores.sigmoid() if self.kind == "sigmoid" else scores

    def extra_repr(self) -> str:
        return f"kind={self.kind!r}"


class Bypass(nn.Module):
    """What a token gets that skips a block: `h + up(down(rms_norm(h))) + bias`, of low rank.

    The paper leaves such a token as it is, and invites other cheap paths (section 5). The input is normalised as a
    block's own is: a few tokens' hidden states are a hundred times larger than the others', and a linear map fitted to
    the others would throw them anywhere. It starts as the identity; calibration fits it in closed form.

    Maps hidden states `[B, S, D]` to `[B, S, D]` of the same dtype.
    """

    def __init__(self, hidden_size: int, rank: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.down = nn.Linear(hidden_size, rank, bias=False, device=device)
        self.up = nn.Linear(rank, hidden_size, device=device)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw `down` from N(0, 1/D), and let the rest be zero: the identity, from which training can leave."""
        with torch.no_grad():
            noise = torch.randn(self.down.weight.shape, generator=generator)
            self.down.weight.copy_(noise * self.down.in_features**-0.5)
            self.up.weight.zero_()
            self.up.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        x = functional.rms_norm(hidden.float(), hidden.shape[-1:], eps=1e-6)
        return hidden + self.up(self.down(x.to(self.down.weight.dtype))).to(hidden.dtype)


class Predictor(nn.Module):
    """Says from a token's hidden state alone whether it would be among the top-k (section 3.5 of the paper).

    A normalised input, a hidden layer of `width`, or none where that is 0, and one logit. The gradient stops at the
    input, so that the prediction never disturbs the language model. `threshold` is what a logit must exceed at
    inference.

    Maps hidden states `[B, S, D]` to logits `[B, S]` in float32.
    """

    threshold: Tensor

    def __init__(self, hidden_size: int, width: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.up = nn.Linear(hidden_size, width, device=device) if width else None
        self.down = nn.Linear(width or hidden_size, 1, device=device)
        self.register_buffer("threshold", torch.zeros((), device=device))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draw the weights from N(0, 1/fan_in)."""
        with torch.no_grad():
            for linear in filter(None, (self.up, self.down)):
                noise = torch.randn(linear.weight.shape, generator=generator)
                linear.weight.copy_(noise * linear.in_features**-0.5)
                linear.bias.zero_()
            self.threshold.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            x = hidden.detach().float().flatten(0, 1)  # rows: runtimes multiply matrices in one operator
            x = functional.rms_norm(x, x.shape[-1:], eps=1e-6)
            if self.up is not None:
                x = functional.silu(functional.linear(x, self.up.weight.float(), self.up.bias.float()))
            logits = functional.linear(x, self.down.weight.float(), self.down.bias.float())
            return logits.view(hidden.shape[:-1])


class RouterAsPredictor(nn.Module):
    """The paper's first method (section 3.5): the router's own score is the logit; only the threshold is kept here.

    Maps scores `[B, S]` to logits `[B, S]`.
    """

    threshold: Tensor

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros((), device=device))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Reset the threshold; there is nothing to draw."""
        self.threshold.zero_()

    def forward(self, scores: Tensor) -> Tensor:
        return scores
