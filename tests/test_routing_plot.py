from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from toy import toy_dense, toy_model, toy_rows

from modify.errors import ConfigError, ModifyError
from modify.routing_plot import RoutingSample, draw_routing, sample_routing


@pytest.fixture(scope="module")
def sample() -> RoutingSample:
    return sample_routing(toy_model(0.25), toy_rows(count=8), routing="topk", rows=3)


def test_sample(sample: RoutingSample) -> None:
    assert sample.blocks == (1, 3)
    assert sample.capacities == (0.25, 0.25)
    assert sample.ran.shape == sample.weights.shape == (2, 3, 16)
    assert (sample.ran.sum(-1) == 4).all()
    assert sample.ran[:, :, 0].all()  # the first token is always kept
    # Of the others, the best ran.
    weights = np.where(np.arange(16) == 0, np.inf, sample.weights)
    assert (np.sort(weights)[..., -4:] == np.sort(np.where(sample.ran, weights, -np.inf))[..., -4:]).all()


def test_predictor_routing_runs_what_the_predictors_say() -> None:
    sample = sample_routing(toy_model(0.25), toy_rows(count=4), rows=4)
    assert sample.routing == "predictor"
    assert sample.ran.shape == (2, 4, 16)


def test_histogram_counts_every_token(sample: RoutingSample) -> None:
    edges, ran, skipped = sample.histogram(10)
    assert len(edges) == 11
    assert ran.sum() == sample.ran.sum()
    assert (ran + skipped).sum() == sample.ran.size
    values = sample.to_dict()
    assert [block["share"] for block in values["blocks"]] == [0.25, 0.25]
    assert np.array(values["first_row"]).shape == (2, 16)


def test_drawing(sample: RoutingSample, tmp_path: Path) -> None:
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        draw_routing(sample, tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(start)
    with pytest.raises(ModifyError, match=r"name it \.png"):
        draw_routing(sample, tmp_path / "a.odd")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "a.svg"]


def test_without_matplotlib(sample: RoutingSample, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModifyError, match=r"pip install 'modify\[plot\]'"):
        draw_routing(sample, tmp_path / "a.png")


def test_options_out_of_range() -> None:
    with pytest.raises(ConfigError, match="dense model"):
        sample_routing(toy_dense(), toy_rows(count=2))
    with pytest.raises(ConfigError, match="rows must be at least 1"):
        sample_routing(toy_model(), toy_rows(count=2), rows=0)
