"""Which blocks are routed, and at what capacity: the search by measured loss."""

from __future__ import annotations

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from checkpoints import write_llama
from families import tiny_model

import modify
from modify.block_search import BlockSearch
from modify.calibration import CalibrationOptions
from modify.conversion import convert_checkpoint
from modify.convert import route_by_predictor
from modify.data import PackedDataset
from modify.errors import CheckpointError, ConfigError, ModifyError
from modify.evaluation import run_rows
from modify.flops import count_flops
from modify.selection import select_blocks
from modify.selection_plot import draw_selection

LENGTH = 256  # one chunk of predictor routing: shorter rows have a slot for every token
CONFIG = modify.MoDConfig(bypass="linear", bypass_rank=2, predictor_hidden=2)


@pytest.fixture(scope="module")
def dense():
    """A model whose block 1 does nothing, and whose block 2 nearly everything."""
    model = tiny_model("llama")
    with torch.no_grad():
        for name, factor in (("self_attn.o_proj", 0.0), ("mlp.down_proj", 0.0)):
            model.model.layers[1].get_submodule(name).weight.mul_(factor)
        for parameter in (model.model.layers[2].mlp.down_proj.weight, model.lm_head.weight):
            parameter.mul_(20.0)
    return model


@pytest.fixture(scope="module")
@torch.no_grad()
def rows(dense) -> PackedDataset:
    """Text that the dense model wrote: what changes the model costs loss."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 99, (12, 1), generator=generator)
    while ids.shape[1] < LENGTH:
        chances = dense(ids, use_cache=False).logits[:, -1].softmax(dim=-1)
        ids = torch.cat([ids, chances.multinomial(1, generator=generator)], dim=1)
    return PackedDataset(ids.flatten().numpy(), LENGTH)


@pytest.fixture(scope="module")
def selection(dense, rows):
    return select_blocks(dense, CONFIG, rows, flops=0.75, rows=12, batch_size=5)


def test_a_block_that_does_nothing_goes_first_and_altogether(selection):
    assert selection.steps[0].block == 1
    assert selection.config.routed_layers(4)[1] == 0.0
    assert abs(selection.alone[1]) < 1e-6
    assert selection.alone[2] == max(selection.alone.values())


def test_the_target_is_met_and_counted_as_the_converted_model_counts(dense, rows, selection):
    assert selection.steps[-2].flops_ratio > 0.75 >= selection.flops_ratio
    model = modify.MoDForCausalLM.from_dense(dense, selection.config)
    deployed = route_by_predictor(model.graph, model.mod_config)
    ratio = count_flops(deployed, 1, LENGTH) / count_flops(model.dense_graph, 1, LENGTH)
    assert ratio == pytest.approx(selection.flops_ratio, rel=1e-9)


def test_losses_are_those_of_the_calibrated_model(dense, rows, selection):
    """The search's own arithmetic, from cached hidden states, against a whole model fitted on the same rows."""
    from modify.calibration import calibrate

    measured = rows.rows[1::3, : LENGTH // 2]
    assert selection.dense_loss == pytest.approx(run_rows(dense, measured, "dense", 4)[0], rel=1e-6)
    model = modify.MoDForCausalLM.from_dense(dense, selection.config)
    rest = [index for index in range(12) if index % 3 != 1]
    fitted = PackedDataset(rows.rows[rest].flatten().numpy(), LENGTH)
    calibrate(model, fitted, rows=len(fitted), batch_size=5)
    loss, _ = run_rows(model, measured, "topk", 4)
    assert selection.loss == pytest.approx(loss, rel=1e-5)


def test_calibration_takes_the_searchs_metrics(dense, rows):
    selection = select_blocks(dense, CONFIG, rows, flops=0.8, capacities=(0.5, 0.25), rows=12, batch_size=5)
    routed = list(selection.config.routed_layers(4))
    assert sorted(selection.metrics) == routed
    models = [modify.MoDForCausalLM.from_dense(dense, selection.config) for _ in range(3)]
    rest = [index for index in range(12) if index % 3 != 1]  # what the search has its metrics from
    fitted = PackedDataset(rows.rows[rest].flatten().numpy(), LENGTH)
    alike = {index: torch.eye(len(metric)) for index, metric in selection.metrics.items()}
    for model, metrics in zip(models, (None, selection.metrics, alike), strict=True):
        modify.calibrate(model, fitted, batch_size=5, metrics=metrics)
    own, given, other = (
        [model.get_submodule(f"routers.{index}").weight for index in routed] for model in models
    )
    torch.testing.assert_close(own, given, rtol=1e-5, atol=1e-6)
    assert not all(torch.allclose(a, b, atol=1e-2) for a, b in zip(own, other, strict=True))
    del alike[routed[0]]
    with pytest.raises(ConfigError, match=f"metrics lack block {routed[0]}"):
        modify.calibrate(models[0], fitted, metrics=alike)


@pytest.mark.parametrize("attend", ["selected", "all"])
@pytest.mark.parametrize("bypass", ["identity", "linear"])
def test_every_kind_of_conversion(dense, rows, attend, bypass):
    config = dataclasses.replace(CONFIG, attend=attend, bypass=bypass)
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    selection = select_blocks(dense, config, rows, flops=0.8, capacities=(0.5, 0.25), rows=6)
    assert set(selection.config.capacity) <= {0.5, 0.25}
    assert selection.flops_ratio <= 0.8
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops": 1.0}, "flops must lie between 0 and 1, got 1.0"),
        ({"flops": 0.5, "capacities": ()}, r"capacities must lie in \[0, 1\), got \[\]"),
        ({"flops": 0.5, "capacities": (0.25, 0.5)}, "capacities must descend"),
        ({"flops": 0.5, "rows": 1}, "rows must be at least 2, got 1"),
        (
            {"flops": 0.2, "capacities": (0.7,)},
            r"flops=0.2 cannot be reached.*takes 0\.8.*; raise flops, or add a lower",
        ),
    ],
)
def test_what_cannot_be_is_refused(dense, rows, options, message):
    with pytest.raises(ConfigError, match=message):
        select_blocks(dense, CONFIG, rows, **{"rows": 4} | options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.layers.0.mlp.up_proj.weight",
            r"block 0: parameter mlp\.up_proj\.weight is not finite; the checkpoint",
        ),
        ("model.norm.weight", "block 0: gradients of the loss behind it are not finite"),
    ],
)
def test_damaged_weights_are_named(dense, rows, name, message):
    damaged = copy.deepcopy(dense)
    with torch.no_grad():
        damaged.get_parameter(name)[3] = torch.nan
    with pytest.raises(CheckpointError, match=f"^{message}"):
        select_blocks(damaged, CONFIG, rows, flops=0.8, rows=4)


def test_a_loss_that_is_no_number_is_no_gain(dense, rows, monkeypatch):
    """Random routers need no gradients, so that the loss is the first to show it; and one trial alone may."""
    damaged = copy.deepcopy(dense)
    with torch.no_grad():
        damaged.model.norm.weight[3] = torch.nan
    config = dataclasses.replace(CONFIG, routing="random")
    with pytest.raises(CheckpointError, match=r"^the dense model: the loss is not finite; the checkpoint's"):
        select_blocks(damaged, config, rows, flops=0.8, rows=4)

    def fit(self, index):
        self._bypass(index).up.bias.fill_(torch.nan)

    monkeypatch.setattr(BlockSearch, "_fit", fit)
    with pytest.raises(CheckpointError, match=r"^block 0 at capacity 0\.6: the loss is not finite"):
        select_blocks(dense, config, rows, flops=0.8, rows=4)


def test_a_converted_model_is_refused(dense, rows):
    model = modify.MoDForCausalLM.from_dense(dense, CONFIG)
    with pytest.raises(
        ConfigError, match=r"^select_blocks takes a dense .* MoDForCausalLM is converted already; give"
    ):
        select_blocks(model, CONFIG, rows, flops=0.8)
    with pytest.raises(ConfigError, match=r"^select_blocks takes a dense .* Linear is none; give"):
        select_blocks(torch.nn.Linear(2, 2), CONFIG, rows, flops=0.8)


def test_the_result_is_json(selection):
    import json

    values = json.loads(json.dumps(selection.to_dict()))
    assert modify.MoDConfig.from_dict(values["config"]) == selection.config
    assert math.isfinite(values["steps"][-1]["loss"])


def test_the_choice_is_drawn(selection, tmp_path):
    draw_selection(selection, tmp_path / "choice.png")
    assert (tmp_path / "choice.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ModifyError, match=r"choice\.xyz cannot be drawn"):
        draw_selection(selection, tmp_path / "choice.xyz")
    assert [path.name for path in tmp_path.iterdir()] == ["choice.png"]


def search_of(dense, rows, batch_size=1, capacities=(0.3,)):
    config = dataclasses.replace(CONFIG, every=1, first_dense=0, last_dense=0, capacity=0.5)
    model = modify.MoDForCausalLM.from_dense(dense, config)
    return BlockSearch(model, rows, batch_size, capacities, "fp32")


class ScriptedSearch(BlockSearch):
    """A search whose costs are written down: of each block, what it adds each time that it is measured."""

    def __init__(self, costs: dict[int, list[float]]) -> None:
        self.costs = {index: iter(values) for index, values in costs.items()}
        self.blocks = self.allowed = list(costs)
        self.blocks_in_model = dict.fromkeys([*costs, -1])
        self.capacities, self.dense_flops = (0.0,), 100
        self.flops = {(index, capacity): int(10 * capacity) for index in costs for capacity in (0.0, 1.0)}
        self.state, self.alone, self.loss = {}, {}, 0.0
        self.on_few = 0

    def _try(self, index, capacity, best=None, *, batches=None):
        self.on_few += batches is not None
        return SimpleNamespace(loss=self.loss + next(self.costs[index]))

    def _take(self, index, capacity, trial):
        self.state[index], self.loss = capacity, trial.loss


def test_a_block_that_was_measured_lately_is_not_passed_over_for_those_that_only_seem_cheap():
    stale = {index: [0.020 + 0.001 * index, 0.05] for index in range(2, 8)}
    search = ScriptedSearch({0: [0.010, 0.030, 0.030], 1: [0.011, 0.011], **stale})
    steps = search.steps(lambda: None)
    assert [next(steps).block for _ in range(2)] == [1, 0]
    assert search.on_few == 8  # blocks alone


def test_a_trial_that_clearly_loses_more_is_given_up():
    search = ScriptedSearch({0: [], 1: []})
    search.losses, search.loss, search.targets_of_loss = [10.0, 11.0, 12.0, 13.0], 0.46, 100
    best = SimpleNamespace(losses=[10.1, 11.2, 12.1, 13.2], saving=0.1, loss=0.466)

    def lag(*added, saving=0.1, best=best):
        losses = [now + more for now, more in zip(search.losses, added, strict=False)]
        return search._lag(losses, saving, best)

    # Twice or three times as much a batch: 4, 4 and 4 nats more per share, of 25 tokens each.
    assert lag(0.5, 0.6, 0.5) == pytest.approx(4.0 / 25)
    assert not lag(0.5, 0.6)  # too few to judge
    assert not lag(0.5, 0.6, 0.5, saving=0.5)  # it saves five times as much
    assert not lag(0.5, -0.2, 0.3)  # it may be chance
    assert not lag(0.5, 0.6, math.nan)  # which is told when all have been run
    gains = SimpleNamespace(losses=[9.9, 10.9, 11.9, 12.9], saving=0.1, loss=0.45)
    assert not lag(0.5, 0.6, 0.5, best=gains)  # what gains is chosen by what it saves


@torch.no_grad()
def test_racing_ends_a_trial_early_and_ranks_it_behind(dense, rows):
    search = search_of(dense, rows.rows)
    trials = {index: search._try(index, 0.3) for index in search.blocks}
    best, worst = trials[0], trials[2]
    assert search.loss < best.loss < worst.loss
    assert len(best.losses) == len(worst.losses) == 4
    raced = search._try(2, 0.3, best)
    assert len(raced.losses) == 3
    assert raced.losses == worst.losses[:3]
    assert search._rate(2, 0.3, raced.loss) > search._rate(0, 0.3, best.loss)
    assert search._try(0, 0.3, worst).loss == best.loss


def test_losses_are_measured_on_several_batches_however_large_a_batch_may_be(dense, rows):
    """Whether a trial is given up is judged batch by batch."""
    search = search_of(dense, rows.rows, batch_size=12)
    assert [len(batch) for batch in search.batches] == [8, 1, 1, 1, 1]


@torch.no_grad()
def test_a_fit_is_made_once_until_all_blocks_are_fitted_anew(dense, rows, monkeypatch):
    search = search_of(dense, rows.rows, capacities=(0.5, 0.3))
    first = search._try(0, 0.5)
    search._take(3, 0.3, search._try(3, 0.3))
    fitted = []
    fit = search._fit
    monkeypatch.setattr(search, "_fit", lambda index: (fitted.append(index), fit(index)))
    again = search._try(0, 0.5)
    assert fitted == []
    assert again.losses != first.losses  # block 3 was lowered in between
    search._load(0, [{name: torch.ones_like(t) for name, t in state.items()} for state in first.states])
    search._set(0, 0.5)
    fit(0)
    for kept, made in zip(again.states, search._states(0), strict=True):
        torch.testing.assert_close(kept, made)
    search._try(0, 0.3)
    assert fitted == [0]
    search.refit()
    search._try(0, 0.3)
    assert fitted == [0, 0, 3, 0]


@torch.no_grad()
def test_a_trial_on_a_few_batches_says_what_they_say(dense, rows):
    text = rows.rows[:, :32].repeat(5, 1)[:57]
    search = search_of(dense, text, batch_size=8)
    assert [len(batch) for batch in search.batches[search.fitted :]] == [2] * 9 + [1]
    whole, few = search._try(2, 0.3), search._try(2, 0.3, batches=2)
    assert few.losses == whole.losses[:2]
    added = sum(few.losses) - sum(search.losses[:2])
    assert few.loss - search.loss == pytest.approx(added / (4 * 15))
    assert whole.loss == sum(whole.losses) / (19 * 15)


def test_a_conversion_works_out_gradients_once(tmp_path, monkeypatch):
    monkeypatch.setattr("modify.calibration.loss_metrics", lambda *args: pytest.fail("the search has them"))
    dense = write_llama(tmp_path / "dense", context=LENGTH)
    text = torch.randint(257, (6 * LENGTH,), generator=torch.Generator().manual_seed(0))
    options = CalibrationOptions(
        data=PackedDataset(text.numpy(), LENGTH), flops=0.9, capacities=(0.5,), rows=4, batch_size=2
    )
    found = convert_checkpoint(dense, tmp_path / "mod", CONFIG, calibration=options)
    assert found.calibration is not None
    assert found.selection is not None
    assert found.selection.metrics == {}
