"""Calibration: closed-form fits against what they must reach, and the oracles that they must leave alone."""

from __future__ import annotations

import json

import pytest
import torch
from families import tiny_model

import modify
from modify.calibration import CalibrationOptions, calibrate, spread_indices
from modify.conversion import convert_checkpoint
from modify.data import PackedDataset
from modify.errors import CheckpointError, ConfigError
from modify.evaluation import evaluate, membership, run_rows
from modify.fitting import fit_predictor
from modify.ops.modules import Predictor, Router
from modify.passes.base import block_calls

LENGTH = 32


@pytest.fixture(scope="module")
def rows() -> PackedDataset:
    tokens = torch.randint(3, 99, (40 * LENGTH,), generator=torch.Generator().manual_seed(0))
    return PackedDataset(tokens.numpy(), LENGTH)


def convert(family="llama", **options):
    defaults = {
        "layers": (1, 2),
        "capacity": 0.5,
        "bypass": "linear",
        "bypass_rank": 16,
        "predictor_hidden": 4,
    }
    return modify.MoDForCausalLM.from_dense(tiny_model(family), modify.MoDConfig(**defaults | options)).eval()


def behind(graph, ids, index):
    """Hidden states behind a block, by running the graph's nodes."""
    seen = {}
    following = min(i for i in block_calls(graph.graph) if i > index)
    block = graph.get_submodule(str(block_calls(graph.graph)[following].target))

    def look(_, args, kwargs):
        seen.setdefault("hidden", args[0] if args else kwargs["hidden_states"])

    hook = block.register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        graph(ids)
    hook.remove()
    return seen["hidden"]


@pytest.mark.parametrize("attend", ["selected", "all"])
def test_errors_shrink_and_are_the_graphs_own(rows, attend):
    model = convert(attend=attend)
    report = calibrate(model, rows, rows=40, batch_size=7)
    assert report.tokens == 40 * LENGTH
    assert [block.index for block in report.blocks] == [1, 2]
    for block in report.blocks:
        assert block.skip_error < block.skip_error_before
    # The error behind block 2, which block 3 runs on, from the whole graph.
    ids = rows.rows.long()
    h, wanted = (behind(graph, ids, 2) for graph in (model.graph, model.dense_graph))
    error = ((h - wanted).square().sum(-1) / wanted.square().sum(-1)).mean().sqrt()
    assert report.blocks[1].error == pytest.approx(float(error), rel=1e-4)


def test_the_bypass_is_the_least_squares_map(rows):
    """A dropped block of full rank against torch's own solver."""
    model = convert(layers=(0,), capacity=0.0, bypass_rank=32)
    (block,) = calibrate(model, rows, rows=40).blocks
    ids = rows.rows.long()
    with torch.no_grad():
        h = model.get_input_embeddings()(ids).flatten(0, 1).double()
    wanted = behind(model.dense_graph, ids, 0).flatten(0, 1).double()
    x = torch.nn.functional.rms_norm(h, h.shape[-1:], eps=1e-6)
    x = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    weight = 1 / wanted.norm(dim=1, keepdim=True)
    map_ = torch.linalg.lstsq(x * weight, (wanted - h) * weight).solution
    best = (((h + x @ map_ - wanted) * weight).square().sum(1)).mean().sqrt()
    assert block.skip_error == pytest.approx(float(best), rel=0.02)  # the ridge costs a little
    assert block.predictor_accuracy is None


def test_the_router_prefers_tokens_that_are_hard_to_skip(rows):
    model = convert(layers=(1,), capacity=0.25)
    (block,) = calibrate(model, rows, rows=40).blocks
    wrong = convert(layers=(1,), capacity=0.25)
    calibrate(wrong, rows, rows=40)
    with torch.no_grad():
        for router in wrong.modules():
            if isinstance(router, Router):
                router.weight.neg_()
                router.bias.neg_()
    errors = []
    for some in (model, wrong):
        ids = rows.rows.long()
        h, wanted = (behind(graph, ids, 1) for graph in (some.graph, some.dense_graph))
        errors.append(((h - wanted).square().sum(-1) / wanted.square().sum(-1)).mean().sqrt())
    assert errors[0] < 0.98 * errors[1]
    assert block.error == pytest.approx(float(errors[0]), rel=1e-4)


@pytest.mark.parametrize("predictor", ["mlp", "linear", "aux"])
def test_the_predictor_says_what_the_router_says(rows, predictor):
    model = convert(predictor=predictor)
    report = calibrate(model, rows, rows=40)
    ids = rows.rows.long()
    with torch.no_grad():
        routing = model(ids, routing="topk").routing
    for block in report.blocks:
        route = routing[block.index]
        assert block.predictor_accuracy > 0.8
        threshold = model.get_submodule(f"predictors.{block.index}").threshold
        assert block.threshold == pytest.approx(float(threshold))
        wanted = membership(route.scores, 0.5, 1)
        agreement = ((route.predictor_logits > threshold) == wanted).float().mean()
        assert agreement > 0.75
    metrics = evaluate(model, rows, routing="predictor")
    for block in metrics.blocks:
        assert block.share == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("width", [0, 2])
@torch.no_grad()
def test_the_predictor_learns_what_a_hidden_state_tells_about_its_rows_threshold(width):
    """Rows of two kinds, whose scores lie far apart: one threshold on the score would run one kind alone."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.nn.functional.normalize(torch.randn(16, 64, 7, generator=generator), dim=-1)
    kind = torch.where(torch.arange(16) % 2 == 0, 1.0, -1.0).view(16, 1, 1)
    hidden = torch.cat([kind.expand(-1, 64, -1), hidden], dim=-1)
    router, predictor = Router(8), Predictor(8, width)
    predictor.reset_parameters(generator)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([2.0, 1.0, 0, 0, 0, 0, 0, 0]))
        scores = router(hidden)
        chosen = membership(scores, 0.5, 0)
        fit_predictor(predictor, router, [hidden], [chosen], [torch.ones_like(chosen)])
        logits = predictor(hidden)
    assert float(((scores > scores.median()) == chosen).float().mean()) < 0.7
    assert float(((logits > 0) == chosen).float().mean()) > 0.95


def test_capacity_one_stays_the_dense_model(rows):
    dense = tiny_model("llama")
    options = modify.MoDConfig(every=1, capacity=1.0, bypass="linear", bypass_rank=4)
    model = modify.MoDForCausalLM.from_dense(dense, options).eval()
    calibrate(model, rows, rows=8)
    ids = rows.rows[:4].long()
    for routing in ("topk", "predictor", "dense"):
        assert torch.equal(model(ids, routing=routing).logits, dense(ids, use_cache=False).logits)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral", "falcon"])
def test_other_architectures(rows, family):
    model = convert(family)
    before = {
        name: t.clone()
        for name, t in model.named_parameters()
        if name in dict(tiny_model(family).named_parameters())
    }
    report = calibrate(model, rows, rows=16)
    assert all(block.skip_error < block.skip_error_before for block in report.blocks)
    now = dict(model.named_parameters())
    assert len(before) > 10
    assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


def test_identity_bypass_and_random_routing(rows):
    plain = convert(bypass="identity")
    for block in calibrate(plain, rows, rows=8).blocks:
        assert block.skip_error == block.skip_error_before
    random = convert(routing="random")
    for block in calibrate(random, rows, rows=8).blocks:
        assert block.skip_error < block.skip_error_before


def test_a_shallower_model(rows):
    model = convert(capacity=0.0)
    before, _ = run_rows(model, rows.rows, "topk", 8)
    report = calibrate(model, rows, rows=40)
    assert [block.capacity for block in report.blocks] == [0.0, 0.0]
    assert run_rows(model, rows.rows, "topk", 8)[0] != before
    assert json.loads(json.dumps(report.to_dict()))["blocks"][0]["threshold"] is None


def test_it_is_reproducible_and_reports_progress(rows):
    states = []
    for _ in range(2):
        model, seen = convert(), []
        calibrate(model, rows, rows=8, progress=lambda done, total, seen=seen: seen.append((done, total)))
        assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]
        assert not model.training
        assert model.conversion_record.fitted
        assert model.config.conversion_record["fitted"]
        states.append(model.state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())


def test_routers_stay_trainable(rows):
    """Scores lie around 0, where `tanh` has a slope and a router that is its own predictor is about right."""
    model = convert(predictor="aux")
    calibrate(model, rows, rows=40)
    with torch.no_grad():
        for gate in model.gates.children():
            gate.alpha.fill_(0.2)
    output = model(rows.rows[:8].long(), routing="topk")
    for route in output.routing.values():
        wanted = membership(route.scores, 0.5, 1)
        assert abs(float(route.scores.mean())) < 2.0
        assert float(((route.scores > 0) == wanted).float().mean()) > 0.8
    output.logits.square().sum().backward()
    for router in model.routers.children():
        assert float(router.weight.grad.norm()) > 1e-3
    model.zero_grad(set_to_none=True)


def test_any_width_of_the_predictor_says_the_same(rows):
    logits = []
    for width in (1, 2, 7):
        model = convert(predictor_hidden=width)
        calibrate(model, rows, rows=8)
        logits.append(model(rows.rows[:2].long(), routing="topk").routing[1].predictor_logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(logits[0], logits[2], rtol=1e-3, atol=1e-3)


def test_random_routing_leaves_the_callers_generator_alone(rows):
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = convert(routing="random")
        before = torch.random.get_rng_state()
        blocks = calibrate(model, rows, rows=8).blocks
        assert torch.equal(torch.random.get_rng_state(), before)
        assert all(block.predictor_accuracy is None for block in blocks)
        states.append(model.state_dict())
    for name, tensor in states[0].items():
        if name.startswith("bypasses."):
            assert torch.equal(tensor, states[1][name])


def test_dropped_blocks_are_reported_with_any_bypass(rows):
    for bypass in ("identity", "linear"):
        model = convert(layers=(0, 1, 3), capacity=(0.0, 0.5, 0.0), bypass=bypass)
        report = calibrate(model, rows, rows=8)
        assert [(block.index, block.capacity) for block in report.blocks] == [(0, 0.0), (1, 0.5), (3, 0.0)]
        for block in report.blocks:
            assert (block.skip_error == block.skip_error_before) == (bypass == "identity")


def test_the_dense_model_keeps_its_cache(rows):
    dense = tiny_model("llama")
    dense.generation_config.use_cache = True
    modify.convert(dense, modify.MoDConfig(capacity=0.5, bypass="linear"), rows)
    assert dense.generation_config.use_cache


def test_bad_numbers_are_refused(rows):
    model = convert()
    with pytest.raises(ConfigError, match="rows must be at least 1, got 0"):
        calibrate(model, rows, rows=0)
    with pytest.raises(ConfigError, match="batch_size must be at least 1, got 0"):
        calibrate(model, rows, batch_size=0)
    for gate in ("linear", "sigmoid"):
        with pytest.raises(ConfigError, match=f"gate='{gate}' cannot be calibrated"):
            calibrate(convert(gate=gate), rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"length": 0}, "length=0: a row needs at least 2 tokens"),
        ({"precision": "fp16"}, "precision must be one of fp32, bf16"),
        ({"capacities": (0.5,)}, "capacities are what flops may lower blocks to: give flops too"),
    ],
)
def test_options_are_checked_when_they_are_made(options, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        CalibrationOptions(data="pydoc", **options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"gate": "linear"}, {}, "gate='linear' cannot be calibrated"),
        ({}, {"flops": 2.0}, "flops must lie between 0 and 1"),
        ({}, {"flops": 0.5, "capacities": (0.2, 0.5)}, "capacities must descend"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_before_the_checkpoint_is_read(
    tmp_path, config, options, message
):
    with pytest.raises(ConfigError, match=f"^{message}"):
        convert_checkpoint(
            tmp_path / "absent",
            tmp_path / "out",
            modify.MoDConfig(**config),
            calibration=CalibrationOptions(data="pydoc", **options),
        )


def test_a_dense_model_is_refused(rows):
    with pytest.raises(
        ConfigError, match=r"^calibrate takes a converted model, and LlamaForCausalLM is none; convert"
    ):
        calibrate(tiny_model("llama"), rows)


def test_rows_are_spread():
    assert spread_indices(10, 2) == [2, 7]
    assert spread_indices(3, 8) == [0, 1, 2]


def test_low_precision_is_close(rows):
    """bf16 blocks, float32 fits: much the same model, and the oracle holds."""
    ids = rows.rows[:4].long()
    reports, models = [], []
    for precision in ("fp32", "bf16"):
        model = convert(attend="all")
        reports.append(calibrate(model, rows, rows=40, precision=precision))
        models.append(model)
    for one, other in zip(*(report.blocks for report in reports), strict=True):
        assert other.error == pytest.approx(one.error, rel=0.05)
    assert not torch.equal(*(model.bypasses.get_submodule("1").up.weight for model in models))
    with torch.no_grad():
        assert torch.equal(models[1](ids, routing="dense").logits, tiny_model("llama").eval()(ids).logits)
    with pytest.raises(ConfigError, match="precision must be one of fp32, bf16, got 'fp16'"):
        calibrate(models[0], rows, precision="fp16")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_named(rows, value):
    model = convert()
    with torch.no_grad():
        model.get_parameter("model.layers.0.mlp.down_proj.weight")[3, 3] = value
    with pytest.raises(
        CheckpointError,
        match=r"^block 0: hidden states are not finite; the checkpoint's weights are damaged, or try precision fp32$",
    ):
        calibrate(model, rows, rows=4)
    model = convert()
    with torch.no_grad():
        model.get_parameter("model.norm.weight")[3] = value  # behind all blocks
    with pytest.raises(CheckpointError, match=r"^block 1: gradients of the loss behind it are not finite"):
        calibrate(model, rows, rows=4)
