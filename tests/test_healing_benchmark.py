"""The healing benchmark from end to end on a model of four blocks; a second run reuses, and a stopped one resumes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import healing
import pytest
import torch
from checkpoints import write_llama
from decoders import token_ids
from families import tiny_model
from healing_arms import ABLATION, ARMS, CONVERSIONS, DENSE, HealingConfig
from healing_plan import CannotReachError, Planner
from healing_texts import accuracy_of_one_threshold

import modify
from modify.checkpoint import load_dense
from modify.errors import ConfigError

pytestmark = pytest.mark.slow

SMALL = (
    "--flops 0.8 --ablation 0.8 --length 256 --batch-size 2 --tokens 5200 --precision fp32 --bypass-rank 2 "
    "--predictor-hidden 2 --capacities 0.5,0.25 --router-share 0.1 "
    "--search-rows 4 --fit-rows 8 --eval-rows 4 --curve-rows 2 --curve-points 2 --save-every 2"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A checkpoint and three texts."""
    folder = tmp_path_factory.mktemp("healing")
    write_llama(folder / "checkpoint")
    for name, first, count in (("train", 0, 700), ("wiki", 3000, 90), ("novel", 7000, 90)):
        text = "".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(first, first + count))
        (folder / f"{name}.txt").write_text(text)
    named = (
        f"--eval {folder / 'wiki.txt'} --eval {folder / 'novel.txt'} --data {folder / 'train.txt'}"
    ).split()
    return ["--checkpoint", str(folder / "checkpoint"), *named, *SMALL.split()]


@pytest.fixture(scope="module")
def arguments(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    out = tmp_path_factory.mktemp("benchmark") / "out"
    return [*files, "--arms", "ours,shallower", "--out", str(out)]


@pytest.fixture(scope="module")
def out(arguments: list[str]) -> Path:
    """The folder of a finished benchmark."""
    healing.main(arguments)
    return Path(arguments[-1])


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def prepared(arguments: list[str], **changes: Any) -> healing.Benchmark:
    options, config = healing.parse(arguments)
    return healing.prepare(
        config, options.checkpoint, options.data, options.calibration, options.eval, options.out, **changes
    )


def test_equal_operations(out: Path) -> None:
    """Arms and settings of the ablation, as their checkpoints count; whose routing is what the names say."""
    ratios = {}
    for path in [*(out / "arms").glob("0.8-*.json"), *(out / "converted").glob("*.json")]:
        ratios[path] = read(path)["flops_ratio"]
    assert len(ratios) == 2 + len(ABLATION) + 1
    assert max(ratios.values()) - min(ratios.values()) < 0.02 * min(ratios.values())
    for name in [*ABLATION, "shallower"]:
        config = modify.load(out / "converted" / f"0.8-{name}").mod_config
        conversion = CONVERSIONS[name]
        assert (config.attend, config.bypass) == (conversion.attend, conversion.bypass)
        assert (set(config.capacity) == {0.0}) == (name == "shallower")
        if conversion.blocks == "interleaved":
            assert config.layers == (1, 3)


def test_tables_say_what_the_files_say(out: Path) -> None:
    lines = (out / "results.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    dense = read(out / "arms" / "dense.json")
    for name in ("ours", "shallower"):
        arm = read(out / "arms" / f"0.8-{name}.json")
        mine = [row for row in rows if row[:2] == ["0.8", ARMS[name].title]]
        assert len(mine) == 3
        for text, row in zip(("wiki", "novel"), mine, strict=False):
            for number, (when, routing) in enumerate(
                (when, routing) for when in ("before", "after") for routing in ("topk", "predictor")
            ):
                if routing not in arm[when][text]:
                    assert (name, row[2 + number]) == ("shallower", "")
                    continue
                perplexity = arm[when][text][routing]["perplexity"]
                reference = dense[when][text]["dense"]["perplexity"]
                assert row[2 + number] == f"{perplexity:,.2f} ({perplexity / reference:.3f})"
        assert mine[2][2] == f"{arm['flops_ratio']:.1%}"
        assert mine[2][7] == f"{arm['seconds']:,.0f}"
    for name, adds in ABLATION.items():
        row = next(row for row in rows if row[0] == adds)
        measured = read(out / "converted" / f"0.8-{name}.json")["measured"]
        assert [cell.split()[0] for cell in row[3:]] == [
            f"{measured[text]['topk']['perplexity']:,.2f}" for text in ("wiki", "novel")
        ]


def test_arms_are_trained_alike(out: Path) -> None:
    arms = {path.stem: read(path) for path in (out / "arms").glob("*.json")}
    assert sorted(arms) == ["0.8-ours", "0.8-shallower", "dense"]
    for arm in arms.values():
        assert arm["tokens"] == 5120
        assert [tokens for tokens, _ in arm["curve"]] == [0, 5 * 512, 10 * 512]
        assert arm["curve"][-1][1] < arm["curve"][0][1]
        assert arm["seconds"] > 0
    assert 0.5 < arms["0.8-ours"]["after"]["wiki"]["topk"]["one_threshold"] <= 1
    assert arms["0.8-shallower"]["after"]["wiki"]["topk"]["one_threshold"] is None
    ours = arms["0.8-ours"]["after"]["wiki"]["predictor"]
    assert 0.5 < ours["predictor_accuracy"] <= 1
    assert 0.5 < ours["share"] < 1.5
    training = arms["0.8-ours"]["training"]
    assert (training["router_steps"], training["predictor_steps"], training["distill_weight"]) == (1, 2, 0.5)
    assert arms["dense"]["training"]["distill_weight"] == 0
    assert (out / "tokens.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "flops.png").read_bytes().startswith(b"\x89PNG")
    assert not any((out / "healed").iterdir())


def test_one_threshold_agrees_with_top_k_within_a_row_and_less_across_rows() -> None:
    config = modify.MoDConfig(capacity=0.25, keep_first=0)
    model = modify.MoDForCausalLM.from_dense(tiny_model("llama"), config).eval()
    rows = token_ids(3, 40)
    assert accuracy_of_one_threshold(model, rows[:1], 1) == 1.0
    with torch.no_grad():
        routing = model(rows, routing="topk").routing
    expected = 0.0
    for block in routing.values():
        level = sorted(block.scores.flatten().tolist())[-30]  # 10 of each row's 40
        for scores in block.scores.tolist():
            best = sorted(scores)[-10]
            expected += sum((score >= level) == (score >= best) for score in scores) / 120 / len(routing)
    assert accuracy_of_one_threshold(model, rows, 2) == pytest.approx(expected)
    assert expected < 1


def test_second_run_makes_nothing(
    arguments: list[str], out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (out / "results.md").read_text()
    for name in ("retrain", "run_rows", "measure", "convert_checkpoint"):
        monkeypatch.delattr(healing, name)
    healing.main(arguments)
    assert capsys.readouterr().out == before
    assert (out / "results.md").read_text() == before


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--learning-rate", "0.5"], "learning_rate is 0.5, but"),
        (["--fit-rows", "7"], "fit_rows is 7, but"),
        (["--eval", "{train}"], "held-out texts is 3, but"),
        (["--data", "{train}", "{train}2"], "text of training is"),
    ],
)
def test_other_settings_are_refused(
    arguments: list[str],
    out: Path,
    changed: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train = arguments[arguments.index("--data") + 1]
    shutil.copy(train, f"{train}2")
    with pytest.raises(SystemExit) as stopped:
        healing.main([*arguments, *(part.format(train=train) for part in changed)])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert "give that value, or another --out" in error
    assert error.count("\n") == 1


def test_stopped_retraining_resumes(
    arguments: list[str], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(out, tmp_path / "out")
    (tmp_path / "out" / "arms" / "0.8-ours.json").unlink()
    again = prepared([*arguments[:-1], str(tmp_path / "out")])
    steps: list[int] = []
    original = healing.retrain

    def stopping(*args: Any, **options: Any) -> Any:
        def stop(entry: dict[str, Any]) -> None:
            if entry.get("step") == 7:
                raise KeyboardInterrupt

        return original(*args, **options | {"progress": stop})

    def noting(*args: Any, **options: Any) -> Any:
        def note(entry: dict[str, Any]) -> None:
            steps.extend([entry["step"]] if "loss" in entry else [])

        return original(*args, **options | {"progress": note})

    monkeypatch.setattr(healing, "retrain", stopping)
    with pytest.raises(KeyboardInterrupt):
        again.heal(ARMS["ours"], "ours", 0.8)
    monkeypatch.setattr(healing, "retrain", noting)
    resumed = again.heal(ARMS["ours"], "ours", 0.8)
    assert steps == [7, 8, 9, 10]
    whole = read(out / "arms" / "0.8-ours.json")
    for key in ("after", "curve"):
        assert json.loads(json.dumps(resumed[key])) == whole[key]


def test_arms_that_differ_in_kind(files: list[str], out: Path, tmp_path: Path) -> None:
    """Random routers, no predictors, fixed gates, nothing that can be trained first, nothing else that moves."""
    arms = ["random", "aux", "zero-gate", "shallower-identity", "routers"]
    shutil.copytree(out, tmp_path / "out")
    settings = ["--keep", "--arms", ",".join(arms), "--ablation", "0", "--out", str(tmp_path / "out")]
    benchmark = prepared([*files, *settings])
    benchmark.run()
    results = {result["arm"]: result for result in benchmark.results}
    assert list(results) == ["dense", *arms]
    ours = read(out / "arms" / "0.8-ours.json")
    for name in arms:
        assert results[name]["flops_ratio"] == pytest.approx(ours["flops_ratio"], rel=0.02)
    assert results["random"]["mod_config"] == ours["mod_config"] | {"routing": "random"}
    assert results["aux"]["mod_config"]["predictor"] == "aux"
    assert results["aux"]["mod_config"]["layers"] == ours["mod_config"]["layers"]
    assert results["routers"]["mod_config"] == ours["mod_config"]
    planned = benchmark.planner.plan(CONVERSIONS["paper"], 0.8).to_dict()
    assert planned == results["zero-gate"]["mod_config"] | {"gate": "linear"}
    healed = tmp_path / "out" / "healed"
    gates = modify.load(healed / "0.8-zero-gate").gates
    assert [gate.alpha.item() for gate in gates.children()] == pytest.approx([0.2, 0.2])
    dense, routers = load_dense(out / "dense"), modify.load(healed / "0.8-routers").state_dict()
    assert all(routers[name].equal(tensor) for name, tensor in dense.state_dict().items())


def test_dry_run(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    healing.main([*files, "--dry-run", "--flops", "0.8,0.5", "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "trains 10 steps, 5,120 tokens" in shown  # of 5,200
    assert re.search(r"\| 0.8 \| paper \| [78]\d\.\d% \| 1 3: 0\.\d+ \|", shown)
    assert re.search(r"\| 0.8 \| ours \| .* \| blocks are chosen by the search", shown)
    assert re.search(
        r"\| 0.5 \| zero-gate \| .* cannot be reached: .* blocks 1, 3 the model takes 0\.\d+ \|", shown
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["dense"]


def test_what_cannot_be_reached_is_told(files: list[str], out: Path, tmp_path: Path) -> None:
    shutil.copytree(out, tmp_path / "out")
    benchmark = prepared(
        [*files, "--arms", "paper", "--flops", "0.4", "--ablation", "0", "--out", str(tmp_path / "out")]
    )
    benchmark.run()
    assert len(benchmark.failures) == 1
    text = (tmp_path / "out" / "results.md").read_text()
    assert "- paper at 0.4: " in text


def test_a_step_of_the_search_goes_as_far_as_it_must(out: Path) -> None:
    options = HealingConfig(length=256, bypass_rank=2, predictor_hidden=2, flops=(0.8,), ablation=0.0)
    planner = Planner(out / "dense", options, out)
    steps = read(out / "search-sensitivity-linear.json")["steps"]
    target = planner.target(0.8)
    assert steps[-1]["flops_ratio"] <= target < steps[-2]["flops_ratio"]
    planned = planner.plan(CONVERSIONS["ours"], 0.8).routed_layers(4)
    last = steps[-1]
    assert last["capacity"] <= planned[last["block"]] < 1.0
    assert {i: c for i, c in planned.items() if i != last["block"]} == {
        step["block"]: step["capacity"] for step in steps if step["block"] != last["block"]
    }
    with pytest.raises(
        CannotReachError, match="with one token per row in each of blocks 1, 3 the model takes"
    ):
        planner.plan(CONVERSIONS["paper"], 0.4)
    with pytest.raises(LookupError):
        planner.plan(CONVERSIONS["ours"], 0.4)


def test_dense_is_trained_with_the_language_model_loss_in_the_same_steps() -> None:
    config = HealingConfig()
    dense, ours = config.training(DENSE), config.training(ARMS["ours"])
    assert (dense.steps, dense.train, dense.precision) == (ours.steps, ours.train, ours.precision)
    assert dense.distill_weight == dense.router_steps == dense.predictor_steps == 0
    assert config.training(ARMS["shallower-identity"]).router_steps == 0
    assert config.training(ARMS["shallower"]).router_steps == ours.router_steps > 0
    assert config.training(ARMS["routers"]).train == "routers"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flops": (1.2,)}, "flops must lie between 0 and 1, got 1.2"),
        ({"flops": (0.8, 0.8)}, "flops must be a list of different values"),
        ({"arms": ("theirs",)}, "arms must be of ours, .*, got theirs"),
        ({"tokens": 100}, "tokens=100 is less than one step of 1 rows of 512"),
        ({"train": "routers"}, "train=routers: that is the arm"),
        ({"router_share": 0.5}, "router_share must be a share"),
        ({"distill": 1.5}, "distill_weight must be a number from 0 to 1"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HealingConfig(**options)
