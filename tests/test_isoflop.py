"""The isoFLOP benchmark from end to end on models of two blocks; a second run reuses, and a stopped one resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import isoflop
import pytest
from isoflop_report import summarise, tables

from modify.errors import ConfigError

pytestmark = pytest.mark.slow

BUDGET = 2e9


@pytest.fixture(scope="module")
def arguments(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("isoflop")
    text = "".join(f"{i} and {i + 1} make {2 * i + 1}.\n" for i in range(2000))
    (folder / "text.txt").write_text(text)
    small = "--sizes 32x2 --middle-seeds 1 --vocabulary 280 --length 32 --batch-size 4 --eval-rows 8 --save-every 5"
    files = ["--data", str(folder / "text.txt"), "--out", str(folder / "out")]
    return [*files, "--budgets", str(BUDGET), *small.split()]


@pytest.fixture(scope="module")
def points(arguments: list[str]) -> dict[str, Any]:
    options, config = isoflop.parse(arguments)
    points = isoflop.run(config, options.data, options.out)
    return {point.kind: point for point in points}


def test_equal_training_flops(points: dict[str, Any]) -> None:
    assert list(points) == ["dense", "mod", "random"]
    for point in points.values():
        one_step = 3 * point.flops * 4 * 32
        assert abs(3 * point.flops * point.tokens - BUDGET) <= one_step / 2 * 1.001
        assert 0 < point.loss < math.log(280) - 1  # that of a guess, less what a few steps teach


def test_routed_models_train_longer(points: dict[str, Any]) -> None:
    dense, mod, random = points["dense"], points["mod"], points["random"]
    assert mod.relative_flops < dense.relative_flops == 1
    assert mod.tokens > dense.tokens
    assert mod.parameters > dense.parameters  # a router and a predictor
    assert random.tokens >= mod.tokens  # no router to run


def test_files(arguments: list[str], points: dict[str, Any]) -> None:
    out = Path(arguments[arguments.index("--out") + 1])
    assert f"| {points['random'].loss:.3f} |" in (out / "isoflop.md").read_text()
    assert (out / "isoflop.png").read_bytes().startswith(b"\x89PNG")
    assert len(list((out / "arms").iterdir())) == 3
    assert not any((out / "models").iterdir())


def test_second_run_trains_nothing(
    arguments: list[str],
    points: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delattr(isoflop, "retrain")
    isoflop.main(arguments)
    assert "| MoD, random routing | 32x2 |" in capsys.readouterr().out


def test_other_options_are_refused(
    arguments: list[str], points: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        isoflop.main([*arguments, "--learning-rate", "0.5"])
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "was trained with learning_rate=" in error
    assert "another --out" in error


def test_stopped_run_continues(arguments: list[str], points: dict[str, Any], tmp_path: Path) -> None:
    options, config = isoflop.parse(arguments)
    texts = isoflop.read_rows(options.data, config, options.out)
    arm = isoflop.Arm("mod", BUDGET, 32, 2, 0)
    steps: list[int] = []

    def stop(entry: dict[str, Any]) -> None:
        if entry.get("step") == 8:
            raise KeyboardInterrupt

    def note(entry: dict[str, Any]) -> None:
        if "step" in entry:
            steps.append(entry["step"])

    with pytest.raises(KeyboardInterrupt):
        isoflop.run_arm(arm, config, texts, tmp_path, stop)
    assert not (tmp_path / "arms").exists()
    resumed = isoflop.run_arm(arm, config, texts, tmp_path, note)
    assert steps[0] == 6
    whole = json.loads((options.out / "arms" / f"{arm.name}.json").read_text())
    assert resumed["loss"] == whole["loss"]


def test_budget_below_one_step(arguments: list[str], tmp_path: Path) -> None:
    options, config = isoflop.parse(arguments)
    texts = isoflop.read_rows(options.data, config, options.out)
    with pytest.raises(ConfigError, match=r"budget 1e\+06 is less than one step"):
        isoflop.run_arm(isoflop.Arm("dense", 1e6, 32, 2, 0), config, texts, tmp_path)


def test_seeds_are_averaged_and_sizes_compared() -> None:
    def result(kind: str, width: int, seed: int, flops: float, loss: float) -> dict[str, Any]:
        routings = ("dense",) if kind == "dense" else ("topk", "predictor")
        return {
            "arm": {"kind": kind, "budget": 1e12, "width": width, "layers": 4, "seed": seed},
            "parameters": width * 1000,
            "tokens": 5,
            "flops": flops,
            "loss": {routing: loss + 0.25 * (routing == "predictor") for routing in routings},
        }

    points = summarise(
        [
            result("mod", 64, 0, 150.0, 2.0),
            result("dense", 64, 0, 300.0, 3.0),
            result("dense", 32, 0, 100.0, 2.5),
            result("dense", 32, 1, 100.0, 2.7),
        ]
    )
    assert [(p.kind, p.size, p.seeds) for p in points] == [
        ("dense", "32x4", 2),
        ("dense", "64x4", 1),
        ("mod", "64x4", 1),
    ]
    assert [p.relative_flops for p in points] == [1.0, 3.0, 1.5]
    assert points[0].loss == pytest.approx(2.6)
    assert points[0].spread == pytest.approx(0.2)
    assert points[2].predictor_loss == 2.25
    best = tables(points).split("\n\n")[0]
    assert "| MoD, learned routing | 64x4 | 2.000 | -0.600 | 1.50 |" in best
    assert "3.000" not in best


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": ()}, "budgets must be a list"),
        ({"budgets": (0.0,)}, "above 0 FLOPs"),
        ({"sizes": ((20, 4),)}, "sizes names 20x4"),
        ({"sizes": ((32, 1),)}, "sizes names 32x1"),
        ({"kinds": ("sparse",)}, "kinds must be of dense, mod, random, got sparse"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"warmup": 1.0}, "warmup must be a share"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        isoflop.IsoFlopConfig(**options)


def test_options_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    needed = ["--data", "a", "b", "--out", "c"]
    options, config = isoflop.parse([*needed, "--sizes", "32x4,64x6", "--kinds", "mod,dense"])
    assert (options.data, config.sizes, config.kinds) == (["a", "b"], ((32, 4), (64, 6)), ("mod", "dense"))
    with pytest.raises(SystemExit):
        isoflop.parse([*needed, "--sizes", "64"])
    assert "invalid sizes value: '64'" in capsys.readouterr().err
