"""Evaluation: perplexity on held-out text, what each routed block really ran, and FLOPs."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor, fx
from torch.nn import functional
from transformers import AutoTokenizer, PreTrainedModel

from modify.convert import route_by_predictor
from modify.data import PackedDataset, pack
from modify.dense import dense_graph
from modify.errors import ConfigError, DataError, ModifyError
from modify.flops import count_flops
from modify.modeling import MoDForCausalLM, Routing
from modify.ops.routing import BlockRouting, Selection, select_topk

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]

_LOGITS_AT_ONCE = 1 << 24  # as float32 in the softmax: 64 MB


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BlockMetrics:
    """What one routed block did on the evaluated text. Shares are of all tokens.

    Attributes:
        index: the block's index.
        capacity: the share that it is meant to run.
        share: the share that it ran.
        predictor_accuracy: share of tokens for which "logit above threshold" agrees with membership in the top-k of the
            router scores, both on the hidden states of this very run.
        overflow: share that the predictor wanted but the static slots had no room for; 0 under top-k routing.
        score_spread: standard deviation of the router scores; near 0 when the router has collapsed.
    """

    index: int
    capacity: float
    share: float
    predictor_accuracy: float
    overflow: float
    score_spread: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Metrics:
    """Result of `evaluate`.

    Attributes:
        routing: `topk`, `predictor` or `dense`.
        rows: number of rows evaluated.
        length: tokens per row.
        tokens: number of tokens predicted: `length - 1` per row.
        loss: mean cross-entropy per predicted token, in nats.
        perplexity: `exp(loss)`.
        blocks: per routed block; empty under dense routing.
        predictor_accuracy: mean over the blocks; None under dense routing.
        flops: operations of one forward pass over `[1, length]` under this routing, as `modify.flops.count_flops`
            counts them; None where they cannot be counted.
        dense_flops: the same for the dense model.
        flops_ratio: `flops / dense_flops`.
    """

    routing: Routing
    rows: int
    length: int
    tokens: int
    loss: float
    perplexity: float
    blocks: tuple[BlockMetrics, ...]
    predictor_accuracy: float | None
    flops: int | None
    dense_flops: int | None
    flops_ratio: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as JSON-ready values."""
        return dataclasses.asdict(self) | {"blocks": [dataclasses.asdict(block) for block in self.blocks]}


def evaluate(
    model: PreTrainedModel,
    data: Any,
    *,
    routing: Routing | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    length: int | None = None,
    batch_size: int = 1,
    limit_rows: int | None = None,
    progress: Progress | None = None,
) -> Metrics:
    """Measure a converted model, or a dense causal LM, on held-out text.

    Each row is a sequence of its own; every token but the first is predicted from those before it. Under `topk`
    routing the selection looks at the future (section 3.5 of the paper), so its perplexity is what training sees, not
    what a deployed model reaches: that is `predictor`. `dense` runs every block on every token, with the weights as
    they are now. One batch of logits is kept at a time. The result is deterministic; random routing draws from a fixed
    seed, and torch's generators are left as they were.

    Args:
        model: a `MoDForCausalLM`, or any dense Hugging Face causal LM: then there are no block metrics.
        data: what `modify.data.pack` takes, or a `PackedDataset`.
        routing: by default `predictor` for a converted model and `dense` for a dense one.
        tokenizer: for text; by default the one in the model's checkpoint directory.
        length: tokens per row, None for `default_length`; a `PackedDataset` has its own.
        batch_size: rows per forward pass. Logits take `batch_size * length * V` numbers.
        limit_rows: evaluate the first rows only.
        progress: called with (rows done, rows to do).

    Raises:
        ConfigError: unknown routing or one that a dense model does not have, a number out of range, no tokenizer.
        DataError: the data cannot be read, is shorter than one row, or does not fit the model.
    """
    is_routed = isinstance(model, MoDForCausalLM)
    routing = routing or ("predictor" if is_routed else "dense")
    if routing not in get_args(Routing):
        raise ConfigError(f"routing must be one of {', '.join(get_args(Routing))}, got {routing!r}")
    if not is_routed and routing != "dense":
        raise ConfigError(f"routing={routing}: {type(model).__name__} is a dense model; use routing='dense'")
    for name, value in (("batch_size", batch_size), ("limit_rows", limit_rows)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    dataset = packed_rows(model, data, tokenizer, length, limit_rows=limit_rows)
    rows = dataset.rows[:limit_rows]
    loss, sums = run_rows(model, rows, routing, batch_size, progress)
    blocks = tuple(
        block.metrics(index, model.capacities[index])
        for index, block in sums.items()
        if isinstance(model, MoDForCausalLM)
    )
    flops, dense_flops = _flops(model, routing, dataset.length)
    return Metrics(
        routing=routing,
        rows=len(rows),
        length=dataset.length,
        tokens=len(rows) * (dataset.length - 1),
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        blocks=blocks,
        predictor_accuracy=(
            sum(block.predictor_accuracy for block in blocks) / len(blocks) if blocks else None
        ),
        flops=flops,
        dense_flops=dense_flops,
        flops_ratio=flops / dense_flops if flops and dense_flops else None,
    )


def membership(
    scores: Tensor, capacity: float, keep_first: int, padding_mask: Tensor | None = None
) -> Tensor:
    """Return `[B, S]` bool: which tokens are in the top-k of `scores`, `[B, S]`; see `select_topk`."""
    return selected(select_topk(scores, capacity, keep_first, padding_mask), scores.shape[1])


def selected(selection: Selection, length: int) -> Tensor:
    """Return `[B, S]` bool: which tokens a selection really runs; fill-up slots do not count."""
    tokens, valid, _ = selection
    mask = torch.zeros(tokens.shape[0], length, dtype=torch.bool, device=tokens.device)
    return mask.scatter(1, tokens, torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid)


def predictor_threshold(model: MoDForCausalLM, index: int) -> Tensor:
    """The scalar buffer that a logit of block `index`'s predictor must exceed."""
    return model.get_buffer(f"predictors.{index}.threshold")


def context_length(model: PreTrainedModel) -> int | None:
    """The longest sequence that `model` takes; None where its config does not say."""
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return context if isinstance(context, int) else None


def default_length(model: PreTrainedModel) -> int:
    """Tokens per row where nobody says: 512, or the model's context where that is shorter."""
    return min(512, context_length(model) or 512)


def packed_rows(
    model: PreTrainedModel,
    data: Any,
    tokenizer: PreTrainedTokenizerBase | None,
    length: int | None,
    *,
    limit_rows: int | None = None,
) -> PackedDataset:
    """Pack `data` into rows that fit `model`, by default of `default_length`; a `PackedDataset` is taken as it is.

    Raises:
        ConfigError: `length` exceeds the model's context, or text comes without a tokenizer.
        DataError: see `pack`, which also refuses a `length` below 2; or a token id lies outside the model's vocabulary.
    """
    config = model.config.get_text_config()
    context = context_length(model)
    if isinstance(data, PackedDataset):
        length = data.length
    elif length is None:
        length = default_length(model)
    if context is not None and length > context:
        raise ConfigError(f"length {length} is longer than the model's context of {context} tokens")
    if not isinstance(data, PackedDataset):
        tokenizer = tokenizer or find_tokenizer(model)
        if tokenizer is None and not _is_tokenised(data):
            raise ConfigError(
                "the data is text, and there is no tokenizer in the model's checkpoint; give one with tokenizer="
            )
        limit = None if limit_rows is None else limit_rows * length
        data = pack(data, cast("PreTrainedTokenizerBase", tokenizer), length, limit_tokens=limit)
    for extreme in map(int, data.rows.aminmax()):
        if 0 <= extreme < config.vocab_size:
            continue
        raise DataError(
            f"the data holds token id {extreme}, but the model's vocabulary has {config.vocab_size} tokens; "
            "use the model's own tokenizer"
        )
    return data


def run_rows(
    model: PreTrainedModel,
    rows: Tensor,
    routing: Routing,
    batch_size: int,
    progress: Progress | None = None,
    observe: Callable[[Mapping[int, BlockRouting]], None] | None = None,
) -> tuple[float, dict[int, BlockSums]]:
    """Run `rows`, `[N, S]` token ids, and return the mean loss and what each routed block did.

    `observe` sees every batch's routing.
    """
    device = next(model.parameters()).device
    options: dict[str, Any] = {"routing": routing} if isinstance(model, MoDForCausalLM) else {}
    total = torch.zeros((), dtype=torch.float64)
    sums: dict[int, BlockSums] = {}
    with _evaluating(model, device):
        for start in range(0, len(rows), batch_size):
            ids = rows[start : start + batch_size].long().to(device)
            output = model(ids, use_cache=False, **options)
            total += loss_sum(output.logits, ids)
            routed = getattr(output, "routing", None) or {}
            if isinstance(model, MoDForCausalLM):
                for index, block in routed.items():
                    sums.setdefault(index, BlockSums()).add(model, index, block, routing)
            if observe is not None:
                observe(routed)
            if progress is not None:
                progress(start + len(ids), len(rows))
    return float(total) / (len(rows) * (rows.shape[1] - 1)), sums


class BlockSums:
    """Running sums of what one routed block did."""

    def __init__(self) -> None:
        self.tokens = self.ran = self.overflowed = self.agreed = 0
        self.scores = self.squares = 0.0

    def add(self, model: MoDForCausalLM, index: int, block: BlockRouting, routing: Routing) -> None:
        """Add one batch without padding."""
        scores, selection, logits = block
        keep_first = model.mod_config.keep_first
        ran = selected(selection, scores.shape[1])
        self.tokens += scores.numel()
        self.ran += int(ran.sum())
        self.scores += float(scores.double().sum())
        self.squares += float(scores.double().square().sum())
        if logits is None:
            return
        wanted = logits > predictor_threshold(model, index)
        best = membership(scores, model.capacities[index], keep_first)
        self.agreed += int((wanted == best).sum())
        if routing == "predictor":
            wanted[:, :keep_first] = True
            self.overflowed += int((wanted & ~ran).sum())

    def metrics(self, index: int, capacity: float) -> BlockMetrics:
        """Return the shares."""
        mean = self.scores / self.tokens
        return BlockMetrics(
            index=index,
            capacity=capacity,
            share=self.ran / self.tokens,
            predictor_accuracy=self.agreed / self.tokens,
            overflow=self.overflowed / self.tokens,
            score_spread=math.sqrt(max(0.0, self.squares / self.tokens - mean * mean)),
        )


@contextmanager
def _evaluating(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Evaluation mode, no gradients, and a fixed seed; everything is as before afterwards."""
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def loss_sum(logits: Tensor, ids: Tensor) -> Tensor:
    """Sum of the next-token cross-entropies, in float64; only a part of the softmax exists at any time."""
    total = torch.zeros((), dtype=torch.float64)
    step = max(1, _LOGITS_AT_ONCE // logits.shape[-1])
    for row, targets in zip(logits[:, :-1], ids[:, 1:], strict=True):
        for some, wanted in zip(row.split(step), targets.split(step), strict=True):
            total += functional.cross_entropy(some.float(), wanted, reduction="none").double().sum().cpu()
    return total


def _flops(model: PreTrainedModel, routing: Routing, length: int) -> tuple[int | None, int | None]:
    """FLOPs of this routing and of the dense model; None where a graph has none that can be counted."""
    if not isinstance(model, MoDForCausalLM):
        dense = _count(lambda: dense_graph(model), length)
        return dense, dense
    dense = _count(lambda: model.dense_graph, length)
    if routing == "dense":
        return dense, dense
    if routing == "topk":
        return _count(lambda: model.graph, length), dense
    return _count(lambda: route_by_predictor(model.graph, model.mod_config), length), dense


def _count(graph: Callable[[], fx.GraphModule], length: int) -> int | None:
    try:
        return count_flops(graph(), 1, length)
    except ModifyError:
        return None


def _is_tokenised(data: Any) -> bool:
    if isinstance(data, str | os.PathLike | Mapping) or not hasattr(data, "__getitem__"):
        return False
    try:
        first = data[0]
    except (IndexError, KeyError, TypeError):
        return False
    return isinstance(first, Mapping) and "input_ids" in first


def find_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    """The tokenizer in the directory that `model` was loaded from, if there is one."""
    path = model.name_or_path
    if not path or not os.path.isfile(os.path.join(path, "tokenizer_config.json")):
        return None
    return AutoTokenizer.from_pretrained(path, local_files_only=True)
