"""Running a routed block only where a token goes through it: in an exported graph, a branch that is really skipped."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class RunIf(nn.Module):
    """Runs one of two modules on the same tensors; both return tensors of the same shapes, none of them an input."""

    def __init__(self, run: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.run, self.skip = run, skip

    def forward(self, predicate: Tensor, *inputs: Tensor) -> Any:
        """Return what `run` makes of the inputs if `predicate`, one bool, is true, and what `skip` makes otherwise."""
        if torch.compiler.is_exporting():
            return torch.cond(predicate, self.run, self.skip, inputs)
        return (self.run if bool(predicate) else self.skip)(*inputs)


def fresh(x: Tensor) -> Tensor:
    """Return a copy laid out in order: what a branch returns must not share memory with anything else."""
    return x.clone(memory_format=torch.contiguous_format)
