"""Distillation: the dense model teaches the one that is retrained."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from modify.errors import ConfigError
from modify.evaluation import context_length
from modify.modeling import MoDForCausalLM
from modify.passes.base import block_calls
from modify.retrain_adapters import without_adapters
from modify.retrain_config import RetrainConfig

if TYPE_CHECKING:
    from peft import LoraModel

_LOGITS_AT_ONCE = 1 << 22  # of each temporary in float32: 16 MB


class Target(NamedTuple):
    """What the teacher says about `N` tokens.

    Attributes:
        logits: `[N, V]`, or `[N, n]` where only the best `n` were kept.
        indices: `[N, n]`, the token ids of these; None for the whole vocabulary.
        normalizer: `[N, 1]` float32, log of the sum over the whole vocabulary of `exp(logit / T)`; None with `indices`.
    """

    logits: Tensor
    indices: Tensor | None = None
    normalizer: Tensor | None = None


def make_target(logits: Tensor, top_n: int, temperature: float) -> Target:
    """Return the teacher's logits `[N, V]` as a target: all of them, or of each token the best `top_n` (0: all)."""
    if not 0 < top_n < logits.shape[-1]:
        return Target(logits)
    values, indices = logits.topk(top_n)
    sums = [(some.float() / temperature).logsumexp(-1, keepdim=True) for some in logits.split(_rows(logits))]
    return Target(values, indices, torch.cat(sums))


def distillation_loss_sum(logits: Tensor, target: Target, counted: Tensor, temperature: float) -> Tensor:
    """Sum over tokens of `T^2 * KL(teacher || student)`, in float32 (Hinton et al. 2015, arXiv 1503.02531).

    With `p = softmax(teacher / T)` and `q = softmax(student / T)` it is `T^2 * sum_v p_v log(p_v / q_v)`; the factor
    keeps the gradient's size independent of `T`. Of a target with only the best `n` logits, the classes are these and
    one for all other tokens together, with the masses `p_rest` and `q_rest`, which adds `p_rest log(p_rest / q_rest)`.
    That is at most the whole divergence (merging classes never raises one), equals it at `n = V`, and unlike a plain
    truncation it does not teach that the other tokens never occur (the residual class of "ghost token" distillation,
    Anshumann et al. 2025, arXiv 2503.16870).

    Only a part of the softmax exists at any time: beyond `logits` and the target one tensor of the size of `logits` is
    kept, the gradient, which is worked out here already.

    Args:
        logits: `[N, V]` of the student.
        target: of the same tokens.
        counted: `[N]` bool; other tokens add nothing.
        temperature: `T`.
    """
    return _DistillationLoss.apply(logits, *target, counted, temperature)


class _DistillationLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        teacher: Tensor,
        indices: Tensor | None,
        normalizer: Tensor | None,
        counted: Tensor,
        temperature: float,
    ) -> Tensor:
        ctx.gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = torch.zeros((), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        step = _rows(logits)
        for start in range(0, len(logits), step):
            rows = slice(start, start + step)
            part = Target(
                teacher[rows],
                None if indices is None else indices[rows],
                None if normalizer is None else normalizer[rows],
            )
            losses, slopes = _divergence(logits[rows], part, temperature)
            weights = counted[rows].to(losses.dtype)
            total += (losses * weights).sum() * temperature**2
            if ctx.gradient is not None:
                ctx.gradient[rows] = slopes * (weights * temperature).unsqueeze(-1)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gradient, ctx.gradient = ctx.gradient, None
        assert gradient is not None, "the distillation loss is differentiated once"
        return gradient.mul_(outer), None, None, None, None, None


def _divergence(logits: Tensor, target: Target, temperature: float) -> tuple[Tensor, Tensor]:
    """KL divergence `[N]` and its derivative by the student's logits over the temperature, `[N, V]`."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    log_q = (logits.to(kind) / temperature).log_softmax(-1)
    q = log_q.exp()
    scaled = target.logits.to(kind) / temperature
    if target.indices is None or target.normalizer is None:
        log_p = scaled.log_softmax(-1)
        p = log_p.exp()
        return (p * (log_p - log_q)).sum(-1), q - p
    log_p = scaled - target.normalizer
    p = log_p.exp()
    p_rest = (1 - p.sum(-1, keepdim=True)).clamp_min(0)
    rest = q.scatter(1, target.indices, 0.0)
    q_rest = rest.sum(-1, keepdim=True).clamp_min(torch.finfo(kind).tiny)
    losses = (p * (log_p - log_q.gather(1, target.indices))).sum(-1, keepdim=True)
    losses = losses + torch.xlogy(p_rest, p_rest) - p_rest * q_rest.log()
    # What the student should say of the others: their own proportions, with the teacher's mass.
    expected = (rest * (p_rest / q_rest)).scatter(1, target.indices, p)
    return losses.squeeze(-1), q - expected


def hidden_loss_sum(student: list[Tensor], teacher: list[Tensor], counted: Tensor) -> Tensor:
    """Sum over tokens of `|student - teacher|^2 / |teacher|^2`, a mean over the places observed, in float32.

    Relative to each token's own size: some tokens' hidden states are a hundred times larger than others', and a ratio
    per token, unlike one per batch, does not depend on how a step is divided into batches.

    Args:
        student: hidden states `[B, S, D]`, one per place.
        teacher: those of the teacher.
        counted: `[B, S]` bool; other tokens add nothing.
    """
    total = torch.zeros((), device=counted.device)
    for ours, theirs in zip(student, teacher, strict=True):
        size = theirs.float().square().sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        distance = (ours.float() - theirs.float()).square().sum(-1)
        total = total + torch.where(counted, distance / size, 0.0).sum()
    return total / len(student)


def _rows(logits: Tensor) -> int:
    return max(1, _LOGITS_AT_ONCE // logits.shape[-1])


class Lesson(NamedTuple):
    """The teacher's answer to one batch, and where the student's hidden states gather while it runs the same batch."""

    target: Target | None
    teacher_hidden: list[Tensor]
    student_hidden: list[Tensor]


class Distillation:
    """A student, its teacher, and what they are compared by.

    Hidden states are compared where they enter a routed block, and where they enter the head.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel | None,
        config: RetrainConfig,
        adapters: LoraModel | None,
    ) -> None:
        """Without `teacher` the student's own weights teach, under dense routing: themselves where training leaves them
        as they are (`adapters` are switched off meanwhile), else a copy made now.

        Raises:
            ConfigError: the teacher does not fit the student.
        """
        self.config = config
        self.adapters = adapters
        if teacher is None:
            teacher = copy.deepcopy(student).requires_grad_(False) if config.train == "all" else student
        self.teacher = teacher
        self._is_own = teacher is student
        self._places = _places(student, teacher) if config.hidden_weight else []

    @contextmanager
    def lesson(self, inputs: dict[str, Any]) -> Iterator[Lesson]:
        """Run the teacher on a batch; while the context is open, a forward pass of the student is observed."""
        config = self.config
        taught: list[Tensor] = []
        with torch.no_grad(), self._as_teacher(inputs["input_ids"].device) as teacher:
            routing = {"routing": "dense"} if isinstance(teacher, MoDForCausalLM) else {}
            with _observe([place for _, place in self._places], inputs["input_ids"], taught):
                logits = teacher(**inputs, **routing, use_cache=False).logits.flatten(0, 1)
        target = None
        if config.distill_weight:
            target = make_target(logits, config.distill_top_n, config.distill_temperature)
        del logits  # with top_n the rest of them is not needed while the student runs
        found: list[Tensor] = []
        with _observe([place for place, _ in self._places], inputs["input_ids"], found):
            yield Lesson(target, taught, found)

    def loss_sums(self, lesson: Lesson, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the sums over tokens that have a target: `distill_loss`, `hidden_loss`, those with a weight.

        Args:
            lesson: of this batch.
            logits: `[B, S, V]` of the student.
            labels: `[B, S]`, not shifted, -100 for no target.
        """
        counted = functional.pad(labels[:, 1:], (0, 1), value=-100) != -100
        sums = {}
        if lesson.target is not None:
            sums["distill_loss"] = distillation_loss_sum(
                logits.flatten(0, 1), lesson.target, counted.flatten(), self.config.distill_temperature
            )
        if self._places:
            if not len(lesson.student_hidden) == len(lesson.teacher_hidden) == len(self._places):
                raise ConfigError(
                    "hidden_weight: the hidden states of this model cannot be observed; use hidden_weight=0"
                )
            sums["hidden_loss"] = hidden_loss_sum(lesson.student_hidden, lesson.teacher_hidden, counted)
        return sums

    @contextmanager
    def _as_teacher(self, device: torch.device) -> Iterator[PreTrainedModel]:
        """The teacher in evaluation mode; the student is afterwards as it was."""
        if next(self.teacher.parameters()).device != device:
            self.teacher.to(device)  # type: ignore[arg-type]
        training = [module for module in self.teacher.modules() if module.training]
        off = nullcontext() if self.adapters is None or not self._is_own else without_adapters(self.adapters)
        try:
            for module in training:
                module.training = False
            with off:
                yield self.teacher
        finally:
            for module in training:
                module.training = True


def check_teacher(
    student: PreTrainedModel, teacher: PreTrainedModel | None, config: RetrainConfig, length: int
) -> None:
    """Check that there is a teacher where one is needed, and that it fits; `length` is that of the rows.

    Raises:
        ConfigError: it is missing, of no use, the student itself, has another vocabulary or a shorter context.
    """
    if not config.distills:
        if teacher is not None:
            raise ConfigError(
                "there is a teacher, but distill_weight and hidden_weight are 0; set distill_weight, 0.9 for example"
            )
        return
    if teacher is None:
        if not isinstance(student, MoDForCausalLM):
            raise ConfigError(
                "distill_weight: a dense model cannot teach itself; give the model that it came from as teacher"
            )
        return
    if teacher is student:
        raise ConfigError("teacher is the model to be trained itself; leave it out, or load it once more")
    ours, theirs = (model.config.get_text_config().vocab_size for model in (student, teacher))
    if ours != theirs:
        raise ConfigError(
            f"the teacher's vocabulary has {theirs} tokens, the model's {ours}; use a teacher with the same tokenizer"
        )
    context = context_length(teacher)
    if context is not None and length > context:
        raise ConfigError(f"length {length} is longer than the teacher's context of {context} tokens")
    if config.hidden_weight:
        _places(student, teacher)


Place = tuple[nn.Module, nn.Module]


def _places(student: PreTrainedModel, teacher: PreTrainedModel) -> list[Place]:
    """Pairs of modules, the student's and the teacher's, whose inputs are compared, in order of execution."""
    heads = student.get_output_embeddings(), teacher.get_output_embeddings()
    places: list[Place] = []
    if isinstance(student, MoDForCausalLM):
        blocks = block_calls(student.dense_graph.graph)
        names = dict(teacher.named_modules())
        for index in student.capacities:
            name = str(blocks[index].target)
            if name not in names:
                raise ConfigError(
                    f"hidden_weight: the teacher has no block {name}; use a teacher of the same architecture, "
                    "or hidden_weight=0"
                )
            places.append((student.get_submodule(f"routers.{index}"), names[name]))
    if heads[0] is None or heads[1] is None or heads[0].weight.shape != heads[1].weight.shape:
        raise ConfigError(
            "hidden_weight: student and teacher have no heads of the same shape to compare at; use hidden_weight=0"
        )
    return [*places, (heads[0], heads[1])]


@contextmanager
def _observe(modules: list[nn.Module], ids: Tensor, found: list[Tensor]) -> Iterator[None]:
    """Add the hidden states that enter each of `modules` to `found`."""

    def observe(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = (
            leaf
            for leaf in tree_leaves((args, kwargs))
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.shape[:2] == ids.shape
        )
        found.extend(itertools.islice(hidden, 1))

    handles = [module.register_forward_pre_hook(observe, with_kwargs=True) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
