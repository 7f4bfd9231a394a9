"""Distillation: the losses against naive code, and who teaches whom."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from toy import toy_dense, toy_model, toy_rows
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback

import modify
from modify import MoDForCausalLM, RetrainConfig
from modify import retrain_distill as distill
from modify.errors import ConfigError
from modify.retrain_adapters import trained_parts
from modify.retrain_distill import Distillation, Target, distillation_loss_sum, hidden_loss_sum, make_target

OPTIONS: dict[str, Any] = {
    "steps": 1,
    "length": 16,
    "batch_size": 4,
    "warmup": 0,
    "save_every": 0,
    "calibration_rows": 4,
    "max_grad_norm": 0.0,
}


def some_logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    student, teacher = (3 * torch.randn(2, 11, 9, dtype=dtype)).unbind()
    return student.requires_grad_(), teacher, torch.tensor([True] * 7 + [False] + [True] * 3)


def naive(student: Tensor, teacher: Tensor, counted: Tensor, temperature: float, top_n: int = 0) -> Tensor:
    p, q = (logits[counted].div(temperature).softmax(-1) for logits in (teacher, student))
    if top_n:
        best = p.topk(top_n).indices
        p, q = (
            torch.cat([x.gather(1, best), 1 - x.gather(1, best).sum(1, keepdim=True)], dim=1) for x in (p, q)
        )
    return temperature**2 * (p * (p / q).log()).sum()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("top_n", [0, 1, 4])
@pytest.mark.parametrize("at_once", [1, 4 * 9, 1 << 22])
def test_loss_and_gradient_are_those_of_naive_code(
    monkeypatch: pytest.MonkeyPatch, temperature: float, top_n: int, at_once: int
) -> None:
    monkeypatch.setattr(distill, "_LOGITS_AT_ONCE", at_once)  # 1 token at a time, 4, or all
    student, teacher, counted = some_logits()
    target = make_target(teacher, top_n, temperature)
    loss = distillation_loss_sum(student, target, counted, temperature)
    (gradient,) = torch.autograd.grad(5 * loss, student)
    expected = naive(student, teacher, counted, temperature, top_n)
    (wanted,) = torch.autograd.grad(5 * expected, student)
    # The normalizer of a truncated target is float32 even here.
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if top_n else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(loss, expected, **tolerance)
    torch.testing.assert_close(gradient, wanted, **tolerance)
    assert not gradient[7].any()


def test_truncation_bounds_the_divergence_from_below_and_ends_at_it() -> None:
    student, teacher, counted = some_logits(torch.float32)
    losses = [
        distillation_loss_sum(student, make_target(teacher, n, 2.0), counted, 2.0).item()
        for n in (1, 2, 4, 8, 9, 0)
    ]
    for fewer, more in itertools.pairwise(losses):
        assert fewer <= more * (1 + 1e-6)  # of sums in float32
    assert losses[0] > 0
    # With one token in the rest class, that class is the token.
    assert losses[3:] == pytest.approx([losses[-1]] * 3, rel=1e-5)
    assert make_target(teacher, 4, 1.0).logits.shape == (11, 4)


def test_a_student_that_agrees_has_no_loss() -> None:
    _, teacher, counted = some_logits(torch.float32)
    for top_n in (0, 3):
        student = (teacher + 5.0).requires_grad_()  # a constant changes no probability
        loss = distillation_loss_sum(student, make_target(teacher, top_n, 1.0), counted, 1.0)
        assert loss.item() == pytest.approx(0.0, abs=1e-5)
        assert torch.autograd.grad(loss, student)[0].abs().max() < 1e-5


def test_no_second_tensor_of_the_logits_size_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "_LOGITS_AT_ONCE", 2 * 1000)
    logits = torch.randn(64, 1000).bfloat16().requires_grad_()
    target = Target(torch.randn(64, 1000).bfloat16())
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                sizes.append(result.numel() * result.element_size())
            return result

    with Sizes():
        distillation_loss_sum(logits, target, torch.ones(64, dtype=torch.bool), 1.0)
    whole = logits.numel() * logits.element_size()
    assert sum(size >= whole for size in sizes) == 1  # the gradient
    assert max(size for size in sizes if size < whole) <= 2 * 1000 * 4


def test_hidden_loss_by_hand() -> None:
    teacher = [torch.tensor([[[3.0, 4.0], [0.0, 100.0]]]), torch.tensor([[[1.0, 0.0], [1.0, 0.0]]])]
    student = [torch.tensor([[[3.0, 3.0], [10.0, 100.0]]]), torch.tensor([[[0.0, 0.0], [9.0, 9.0]]])]
    assert hidden_loss_sum(student, teacher, torch.tensor([[True, True]])).item() == pytest.approx(
        (1 / 25 + 100 / 10000 + 1 + 145) / 2
    )
    assert hidden_loss_sum(student, teacher, torch.tensor([[True, False]])).item() == pytest.approx(
        (1 / 25 + 1) / 2
    )


def entry(tmp_path: Path, model: Any = None, teacher: Any = None, **changes: Any) -> dict[str, float]:
    """The first log entry of a run."""
    config = RetrainConfig(**(OPTIONS | changes))
    report = modify.retrain(
        model or toy_model(),
        toy_rows(),
        config=config,
        output_dir=tmp_path / "out",
        teacher=teacher,
        overwrite=True,
    )
    return report.history[0]


@pytest.mark.parametrize("train", ["all", "lora", "routers"])
def test_the_loss_is_the_mixture(tmp_path: Path, train: str) -> None:
    found = entry(
        tmp_path,
        train=train,
        distill_weight=0.75,
        distill_temperature=2.0,
        hidden_weight=0.5,
        predictor_loss_weight=2.0,
    )
    plain = entry(tmp_path, train=train)
    assert "distill_loss" not in plain
    assert found["lm_loss"] == plain["lm_loss"]
    assert min(found["distill_loss"], found["hidden_loss"]) > 1e-4
    expected = (
        0.25 * found["lm_loss"]
        + 0.75 * found["distill_loss"]
        + 0.5 * found["hidden_loss"]
        + 2 * found["predictor_loss"]
    )
    assert found["loss"] == pytest.approx(expected, rel=1e-6)


def test_the_teacher_is_the_dense_model(tmp_path: Path) -> None:
    model, dense = toy_model(), toy_dense()
    rows = toy_rows()
    config = RetrainConfig(**(OPTIONS | {"batch_size": 60, "distill_weight": 1.0}))
    copied = copy.deepcopy(model)
    report = modify.retrain(model, rows, config=config, output_dir=tmp_path / "out")
    kept = [i for i in range(64) if i not in (8, 24, 40, 56)]  # the others calibrate
    ids = rows.rows[kept].long()
    with torch.no_grad():
        p, q = (
            logits[:, :-1].log_softmax(-1)
            for logits in (dense(ids).logits, copied(ids, routing="topk").logits)
        )
    expected = functional.kl_div(q, p, log_target=True, reduction="sum") / q[..., 0].numel()
    assert report.history[0]["distill_loss"] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("train", ["all", "lora", "routers"])
def test_a_model_that_runs_every_token_has_nothing_to_learn(tmp_path: Path, train: str) -> None:
    # Dropout is the student's alone; without it, capacity 1.0 is the dense model bit for bit.
    found = entry(
        tmp_path, toy_model(1.0), train=train, distill_weight=1.0, hidden_weight=1.0, distill_top_n=7
    )
    assert found["hidden_loss"] == 0.0
    assert found["distill_loss"] == pytest.approx(0.0, abs=1e-6)
    noisy = entry(tmp_path, toy_model(1.0, attention_dropout=0.5), train=train, hidden_weight=1.0)
    assert noisy["hidden_loss"] > 0.01


def test_what_is_frozen_teaches_without_a_copy(tmp_path: Path) -> None:
    config = {train: RetrainConfig(train=train, distill_weight=0.5) for train in ("all", "lora", "routers")}
    model = toy_model()
    assert Distillation(model, None, config["routers"], None).teacher is model
    copied = Distillation(model, None, config["all"], None).teacher
    assert copied is not model
    assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}
    assert not any(p.requires_grad for p in copied.parameters())
    ids = torch.arange(16).view(1, 16)
    with trained_parts(model, config["lora"]) as adapters:
        taught = Distillation(model, None, config["lora"], adapters)
        assert taught.teacher is model
        frozen = {name: p.requires_grad for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_()
        adapted = model(ids, routing="dense").logits
        with taught.lesson({"input_ids": ids}) as lesson:
            assert torch.equal(model(ids, routing="dense").logits, adapted)
        assert lesson.target is not None
        assert torch.equal(lesson.target.logits, toy_dense()(ids).logits[0])
        assert not torch.equal(lesson.target.logits, adapted[0])
        assert frozen == {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_distilling_alone_reaches_what_is_trained(tmp_path: Path, precision: str) -> None:
    class Gradients(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: MoDForCausalLM, **kwargs: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    norms[name] = float(parameter.grad.norm())

    norms: dict[str, float] = {}
    config = RetrainConfig(
        **(OPTIONS | {"train": "lora", "distill_weight": 1.0, "predictor_loss_weight": 0.0}),
        precision=precision,
    )
    modify.retrain(
        toy_model(), toy_rows(), config=config, output_dir=tmp_path / "out", callbacks=[Gradients()]
    )
    assert norms["model.layers.0.mlp.up_proj.lora_B.default.weight"] > 0
    assert norms["gates.3.alpha"] > 0
    assert not [name for name in norms if name.startswith("model.") and "lora_" not in name]


@pytest.mark.parametrize("changes", [{}, {"train": "lora", "distill_top_n": 5}])
def test_accumulation_equals_a_larger_batch(tmp_path: Path, changes: dict[str, Any]) -> None:
    both = {"distill_weight": 0.5, "hidden_weight": 0.5, **changes}
    large = entry(tmp_path, **both)
    small = entry(tmp_path, batch_size=1, gradient_accumulation=4, **both)
    for name in ("loss", "distill_loss", "hidden_loss", "grad_norm"):
        assert small[name] == pytest.approx(large[name], rel=1e-5), name
    checkpointed = entry(tmp_path, gradient_checkpointing=True, **both)
    for name in ("loss", "distill_loss", "hidden_loss", "grad_norm"):
        assert checkpointed[name] == large[name], name


def shallower(**options: Any) -> LlamaForCausalLM:
    model = toy_dense(**options)
    del model.model.layers[2]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = 3
    return model


def test_a_dense_model_learns_from_a_teacher(tmp_path: Path) -> None:
    teacher = toy_dense()
    before = copy.deepcopy(teacher.state_dict())
    config = RetrainConfig(
        **(OPTIONS | {"steps": 20, "learning_rate": 1e-3, "distill_weight": 1.0, "hidden_weight": 0.1})
    )
    report = modify.retrain(
        shallower(), toy_rows(), config=config, output_dir=tmp_path / "out", teacher=teacher
    )
    first, last = report.history[0], report.history[-1]
    assert 0 < last["hidden_loss"] < first["hidden_loss"]
    assert 0 < last["distill_loss"] < first["distill_loss"]
    assert all(torch.equal(before[name], value) for name, value in teacher.state_dict().items())


def test_a_given_teacher_replaces_the_own_weights(tmp_path: Path) -> None:
    own = entry(tmp_path, distill_weight=0.5, hidden_weight=0.5)
    same = entry(tmp_path, teacher=toy_dense(), distill_weight=0.5, hidden_weight=0.5)
    assert same["distill_loss"] == pytest.approx(own["distill_loss"], rel=1e-4)
    assert same["hidden_loss"] == pytest.approx(own["hidden_loss"], rel=1e-4)
    converted = entry(tmp_path, teacher=toy_model(0.125), distill_weight=0.5, hidden_weight=0.5)
    assert converted["hidden_loss"] == own["hidden_loss"]  # a converted teacher runs under dense routing
    other = toy_dense()
    with torch.no_grad():
        other.lm_head.weight.mul_(3)
    assert entry(tmp_path, teacher=other, distill_weight=0.5)["distill_loss"] > 2 * own["distill_loss"]


def tiny_llama(**options: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **options))


@pytest.mark.parametrize(
    ("model", "teacher", "changes", "message"),
    [
        (toy_model, toy_dense, {}, "there is a teacher, but distill_weight and hidden_weight are 0"),
        (toy_dense, None, {"distill_weight": 0.5}, "distill_weight: a dense model cannot teach itself"),
        (
            toy_model,
            lambda: tiny_llama(vocab_size=51),
            {"distill_weight": 0.5},
            "the teacher's vocabulary has 51 tokens, the model's 50",
        ),
        (
            toy_model,
            lambda: tiny_llama(vocab_size=50, max_position_embeddings=8),
            {"distill_weight": 0.5},
            "length 16 is longer than the teacher's context of 8 tokens",
        ),
        (toy_model, shallower, {"hidden_weight": 0.5}, r"the teacher has no block model\.layers\.3"),
    ],
)
def test_teachers_that_do_not_fit(
    tmp_path: Path, model: Any, teacher: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        entry(tmp_path, model(), None if teacher is None else teacher(), **changes)
    assert not list(tmp_path.iterdir())


def test_a_model_is_not_its_own_teacher(tmp_path: Path) -> None:
    model = toy_model()
    with pytest.raises(ConfigError, match="teacher is the model to be trained itself"):
        entry(tmp_path, model, model, distill_weight=0.5)
