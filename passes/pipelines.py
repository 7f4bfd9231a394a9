"""The pipelines, as data: which passes run, and in what order."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from modify.passes.base import GraphPass
from modify.passes.classify_masks import ClassifyMasks
from modify.passes.drop_blocks import DropBlocks
from modify.passes.flatten_token_indexing import FlattenTokenIndexing
from modify.passes.freeze_shapes import FreezeShapes
from modify.passes.insert_bypasses import InsertBypasses
from modify.passes.insert_predictors import InsertPredictors
from modify.passes.insert_routers import InsertRouters
from modify.passes.keep_last_logits import KeepLastLogits
from modify.passes.limit_rows import LimitRows
from modify.passes.lower_to_cached import LowerToCached
from modify.passes.lower_to_chunk import LowerToChunk
from modify.passes.route_by_predictor import RouteByPredictor
from modify.passes.run_one_token import RunOneToken
from modify.passes.split_blocks import SplitBlocks
from modify.passes.strip_training_outputs import StripTrainingOutputs

Pipeline = tuple[type[GraphPass], ...]

# A captured dense graph whose masks are cheap.
DENSE: Pipeline = (ClassifyMasks,)
# A captured dense graph becomes the training graph of a Mixture-of-Depths model.
CONVERT: Pipeline = (ClassifyMasks, InsertRouters, InsertBypasses, DropBlocks, InsertPredictors)
# A training graph becomes one that decides causally, as it is deployed.
PREDICT: Pipeline = (RouteByPredictor,)
# A training graph, or a dense one, becomes a static graph for export.
PREFILL: Pipeline = (
    RouteByPredictor,
    StripTrainingOutputs,
    KeepLastLogits,
    FreezeShapes,
    FlattenTokenIndexing,
)
# A training graph, or a dense one, captured with a cache, takes chunks of new tokens.
CACHED: Pipeline = (RouteByPredictor, StripTrainingOutputs, LowerToCached)
CACHED_LAST: Pipeline = (RouteByPredictor, StripTrainingOutputs, KeepLastLogits, LowerToCached)
# The same, whose blocks run in parts, becomes a static graph for export that takes chunks of new tokens.
CHUNK: Pipeline = (RouteByPredictor, StripTrainingOutputs, KeepLastLogits, SplitBlocks, LowerToChunk)
# That one becomes the decode graph; with several sequences, blocks may run a fixed number of them.
DECODE: Pipeline = (RunOneToken,)
DECODE_LIMITED: Pipeline = (LimitRows, RunOneToken)

MUST_PRECEDE: tuple[tuple[type[GraphPass], type[GraphPass]], ...] = (
    (ClassifyMasks, InsertRouters),  # masks among selected tokens are rebuilt from what classification found
    (InsertRouters, InsertBypasses),
    (InsertRouters, DropBlocks),  # shapes must still be symbols while blocks are told apart
    (InsertRouters, InsertPredictors),
    (InsertPredictors, RouteByPredictor),
    (RouteByPredictor, StripTrainingOutputs),  # the predictors' logits are found among the training outputs
    (StripTrainingOutputs, KeepLastLogits),
    (KeepLastLogits, FreezeShapes),  # what belongs to the head is told by the sequence symbol
    (KeepLastLogits, LowerToCached),  # where the last block ends is told by its merge
    (KeepLastLogits, LowerToChunk),
    (SplitBlocks, LowerToChunk),  # keys and values are stored between the parts
    (LimitRows, RunOneToken),  # what is limited is left; the other blocks run all sequences
    (FreezeShapes, FlattenTokenIndexing),  # frozen masks vanish before their indexing would be lowered
)


def build(
    pipeline: Pipeline, options: Mapping[str, Any], *, without: Collection[type[GraphPass]] = ()
) -> list[GraphPass]:
    """Instantiate a pipeline; each pass takes the options that are named like its fields."""
    return [
        kind(
            **{field.name: options[field.name] for field in dataclasses.fields(kind) if field.name in options}
        )
        for kind in pipeline
        if kind not in without
    ]


def check_order(pipeline: Pipeline) -> None:
    """Assert that the pipeline keeps every pair of `MUST_PRECEDE`."""
    for first, second in MUST_PRECEDE:
        if first in pipeline and second in pipeline:
            assert pipeline.index(first) < pipeline.index(second), (
                f"{first.__name__} must precede {second.__name__}"
            )


for _pipeline in (DENSE, CONVERT, PREDICT, PREFILL, CACHED, CACHED_LAST, CHUNK, DECODE, DECODE_LIMITED):
    check_order(_pipeline)
