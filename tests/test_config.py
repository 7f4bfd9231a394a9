"""Options: ranges, the blocks that they name, and the JSON round trip."""

from __future__ import annotations

import json

import pytest

from modify import MoDConfig
from modify.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": -0.1}, r"capacity must lie in \[0, 1\], got -0\.1"),
        ({"capacity": 1.2}, r"capacity must lie in \[0, 1\], got 1\.2"),
        ({"capacity": float("nan")}, "capacity must lie in"),
        ({"capacity": "half"}, "capacity must lie in"),
        ({"capacity": ()}, "capacity is an empty list"),
        ({"capacity": (0.5, 2.0)}, "capacity must lie in"),
        ({"every": 0}, "every must be an integer of at least 1"),
        ({"first_dense": -1}, "first_dense must be an integer of at least 0"),
        ({"keep_first": 1.5}, "keep_first must be an integer"),
        ({"layers": ()}, "layers is empty"),
        ({"layers": (1, "2")}, "layers must be block indices"),
        ({"gate": "relu"}, "gate must be one of tanh, linear, sigmoid, got 'relu'"),
        ({"bypass": "mlp"}, "bypass must be one of identity, linear, got 'mlp'"),
        ({"bypass_rank": 0}, "bypass_rank must be an integer of at least 1"),
        ({"attend": "none"}, "attend must be one of selected, all, got 'none'"),
        ({"routing": "topk"}, "routing must be one of learned, random"),
        ({"predictor": "none"}, "predictor must be one of mlp, linear, aux"),
        ({"predictor_slack": 0.5}, r"predictor_slack must be at least 1\.0"),
        ({"predictor_hidden": 0}, "predictor_hidden must be an integer of at least 1"),
        ({"seed": 1.0}, "seed must be an integer"),
        ({"seed": -1}, "seed must be an integer of at least 0, got -1"),
        ({"seed": 2**32}, "seed must be an integer of at most 4294967295, got 4294967296"),
        ({"keep_first": 10**25}, "keep_first must be an integer of at most 2147483647, got 1"),
        ({"bypass_rank": 2**31}, "bypass_rank must be an integer of at most"),
        ({"predictor_hidden": 2**31}, "predictor_hidden must be an integer of at most"),
        ({"predictor_slack": 1e308}, r"predictor_slack must be at least 1\.0 and at most 256, got 1e\+308"),
        ({"capacity": 10**400}, r"capacity must lie in \[0, 1\]"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        MoDConfig(**options)


@pytest.mark.parametrize(
    ("options", "blocks"),
    [
        ({}, [1, 3, 5]),
        ({"every": 3}, [2, 5]),
        ({"every": 1}, [0, 1, 2, 3, 4, 5]),
        ({"first_dense": 2}, [3, 5]),
        ({"last_dense": 1}, [1, 3]),
        ({"layers": (4, 0, -1)}, [0, 4, 5]),
    ],
)
def test_routed_blocks(options, blocks):
    assert MoDConfig(**options, capacity=0.25).routed_layers(6) == dict.fromkeys(blocks, 0.25)


def test_one_capacity_per_block():
    assert MoDConfig(layers=(1, 4), capacity=(0.5, 0.25)).routed_layers(6) == {1: 0.5, 4: 0.25}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": (6,)}, r"layers names block 6, but the model has 6 blocks \(0 to 5\)"),
        ({"layers": (-7,)}, "layers names block -7"),
        ({"layers": (1, -5)}, "layers names a block twice"),
        ({"every": 7}, "no block is left to route"),
        ({"first_dense": 6}, "no block is left to route"),
        ({"capacity": (0.5, 0.5)}, r"capacity has 2 values, but 3 blocks are routed: \[1, 3, 5\]"),
    ],
)
def test_options_that_do_not_fit_the_model(options, message):
    with pytest.raises(ConfigError, match=message):
        MoDConfig(**options).routed_layers(6)


@pytest.mark.parametrize(
    "config",
    [
        MoDConfig(),
        MoDConfig(capacity=(0.5, 0.1), layers=(2, 3), gate="linear", predictor="aux", attend="all"),
    ],
)
def test_json_round_trip(config):
    assert MoDConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_an_unknown_option_is_refused():
    with pytest.raises(
        ConfigError, match="unknown option depth; known options are attend, bypass, bypass_rank, capacity"
    ):
        MoDConfig.from_dict({"depth": 3})
