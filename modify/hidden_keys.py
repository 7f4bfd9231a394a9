"""Hiding tokens from attention, wherever in a block it is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from modify.ops.masks import causal_mask
from modify.ops.routing import Selection


class HideUnselectedKeys(TorchFunctionMode):
    """Hides the unselected tokens' keys from every attention over the sequence, and notes token selection inside."""

    def __init__(self, selection: Selection, length: int) -> None:
        super().__init__()
        assert selection.valid is not None
        self.batch, self.length = len(selection.tokens), length
        hidden = torch.ones(self.batch, length, dtype=torch.bool, device=selection.tokens.device)
        hidden.scatter_(1, selection.tokens, ~selection.valid)
        self.hidden = hidden
        self.token_selection: str | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            return self._attention(func, *args, **kwargs)
        if (
            name in ("softmax", "_softmax")
            and args
            and isinstance(args[0], Tensor)
            and self._over_keys(args[0])
        ):
            scores = args[0].masked_fill(self._columns(args[0]), torch.finfo(args[0].dtype).min)
            return func(scores, *args[1:], **kwargs)
        if name in ("topk", "sort", "argsort") and args and isinstance(args[0], Tensor):
            dim = kwargs.get("dim", -1)
            if args[0].dim() and isinstance(dim, int) and args[0].shape[dim] == self.length:
                self.token_selection = name
        return func(*args, **kwargs)

    def _over_keys(self, scores: Tensor) -> bool:
        """`[.., S, S]`, or one column more where attention has a sink."""
        return (
            scores.dim() >= 3
            and scores.shape[-2] == self.length
            and scores.shape[-1] in (self.length, self.length + 1)
        )

    def _columns(self, scores: Tensor) -> Tensor:
        hidden = self.hidden.to(scores.device)
        if scores.shape[-1] > self.length:
            hidden = torch.cat([hidden, hidden.new_zeros(self.batch, 1)], dim=1)
        repeated = hidden.repeat_interleave(scores.shape[0] // self.batch, dim=0)
        return repeated.view(-1, *[1] * (scores.dim() - 2), hidden.shape[1])

    def _attention(
        self,
        func: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        if key.shape[-2] == self.length and query.shape[-2] == self.length:
            if is_causal and attn_mask is None:
                attn_mask = causal_mask(None, query.transpose(1, 2), None, torch.bool, False)
                is_causal = False
            visible = ~self.hidden.to(query.device).view(self.batch, *[1] * (query.dim() - 2), self.length)
            if attn_mask is None:
                attn_mask = visible.expand(self.batch, *[1] * (query.dim() - 3), self.length, self.length)
            elif attn_mask.dtype == torch.bool:
                attn_mask = attn_mask & visible
            else:
                attn_mask = attn_mask.masked_fill(~visible, torch.finfo(attn_mask.dtype).min)
        return func(query, key, value, attn_mask, dropout_p, is_causal, **kwargs)
