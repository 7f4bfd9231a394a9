"""ONNX bundles: parity, legality for TensorRT, options, and nothing left behind by a failure."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
import torch
from checkpoints import byte_tokenizer
from torch import fx, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from modify.config import MoDConfig
from modify.convert import convert
from modify.errors import ExportError, StorageError
from modify.export import load_engine, read_manifest, to_onnx, to_tensorrt
from modify.ops.routing import predictor_slots, select_predicted, select_topk
from modify.passes import keep_last_logits
from modify.passes.route_by_predictor import RouteByPredictor

LENGTH = 24


def llama() -> PreTrainedModel:
    config = LlamaConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=99,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def neox() -> PreTrainedModel:
    config = GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        vocab_size=99,
        max_position_embeddings=64,
    )
    return GPTNeoXForCausalLM(config)


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=99, n_positions=64))


def converted(model: Callable[[], PreTrainedModel], **options: object) -> fx.GraphModule:
    """A converted graph whose gates are open, so that a wrong score would show in the logits."""
    torch.manual_seed(0)
    graph = convert(model().eval(), MoDConfig(**{"capacity": 0.25, "layers": (0, 2), **options}))
    for name, parameter in graph.named_parameters():
        if name.endswith("alpha"):
            torch.nn.init.constant_(parameter, 0.5)
    return graph


@pytest.fixture(scope="module")
def graphs() -> dict[str, fx.GraphModule]:
    return {
        "llama": converted(llama),
        "neox": converted(neox),
        "llama, all": converted(llama, attend="all"),
        "gpt2, all": converted(gpt2, attend="all"),
    }


def predicted_logits(graph: fx.GraphModule, ids: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The logits of the training graph when its predictors decide; no pass of the export takes part."""

    class Predicted(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            if n.target is not select_topk:
                return super().run_node(n)
            (_, capacity, keep_first, padding), _ = self.fetch_args_kwargs_from_env(n)
            block = n.args[0].target.removeprefix("routers.")
            predictor = graph.get_submodule(f"predictors.{block}")
            predicted = predictor(self.env[n.args[0].args[0]])
            return select_predicted(predicted, predictor.threshold, capacity, 1.25, keep_first, padding)

    with torch.no_grad():
        return Predicted(graph).run(ids, mask).logits


@pytest.mark.parametrize(
    ("name", "routing", "padding", "batch", "logits"),
    [
        ("llama", "topk", False, 1, "all"),
        ("llama", "topk", True, 2, "last"),
        ("llama", "predictor", False, 2, "last"),
        ("llama", "predictor", True, 1, "all"),
        ("neox", "topk", False, 2, "last"),
        ("neox", "topk", True, 1, "all"),
        ("neox", "predictor", False, 1, "last"),
        ("neox", "predictor", True, 2, "all"),
        ("llama", "dense", True, 2, "last"),
        ("llama, all", "topk", False, 2, "last"),
        ("llama, all", "predictor", True, 1, "all"),
        ("gpt2, all", "topk", True, 2, "all"),
        ("gpt2, all", "predictor", False, 1, "last"),
    ],
)
def test_bundle_agrees_with_pytorch_and_builds_with_tensorrt(
    graphs: dict[str, fx.GraphModule],
    tmp_path: Path,
    name: str,
    routing: str,
    padding: bool,
    batch: int,
    logits: str,
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="builds engines without a GPU, on Linux x86-64 only")
    out = tmp_path / "bundle"
    report = to_onnx(
        graphs[name],
        out,
        batch=batch,
        length=LENGTH,
        routing=routing,
        padding=padding,
        logits=logits,
        verify_inputs=range(50),
    )
    names = [".modify", "manifest.json", "model.onnx", "model.onnx.data"]
    assert sorted(path.name for path in out.iterdir()) == names
    manifest = read_manifest(out)
    assert manifest == report.manifest
    assert max(parity.max_difference for parity in manifest.parity) < 1e-5
    assert {parity.inputs for parity in manifest.parity} == (
        {"random", "random, padded", "text", "text, padded"} if padding else {"random", "text"}
    )
    assert {parity.reference for parity in manifest.parity} == {"lowered", "eager"}
    slots = predictor_slots(0.25, 1.25, LENGTH) if routing == "predictor" else 6
    expected = [] if routing == "dense" else [(0, 0.25, slots), (2, 0.25, slots)]
    assert [(b.block, b.capacity, b.tokens) for b in manifest.routed_blocks] == expected
    assert manifest.tensorrt_obstacles == ()

    # On inputs that the export did not see, and against the model as it is trained, not the graph that was exported.
    engine = load_engine(out)
    ids = torch.randint(99, (batch, LENGTH), generator=torch.Generator().manual_seed(7))
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH - 5], [LENGTH]])[:batch]).long() if padding else None
    got = torch.from_numpy(engine(ids.numpy(), None if mask is None else mask.numpy()))
    if routing == "predictor":
        want = predicted_logits(graphs[name], ids, mask)
    else:
        graph = graphs[name].meta["dense_graph"] if routing == "dense" else graphs[name]
        want = graph(ids, mask)
        want = getattr(want, "logits", want)
    real = torch.ones_like(ids) if mask is None else mask
    if logits == "last":
        torch.testing.assert_close(got[:, 0], want[torch.arange(batch), real.sum(1) - 1], atol=1e-5, rtol=0)
    else:
        torch.testing.assert_close(got[real != 0], want[real != 0], atol=1e-5, rtol=0)

    built = to_tensorrt(out, tmp_path / "engine", target="tensorrt-rtx")
    assert built.manifest.target == "tensorrt-rtx"
    assert read_manifest(tmp_path / "engine").files["model.engine"].bytes > 1000
    with pytest.raises(ExportError, match="holds an engine for tensorrt-rtx"):
        load_engine(tmp_path / "engine")


class Shift(nn.Module):
    """A leaf module that mixes each token with the one before it."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + nn.functional.pad(hidden, (0, 0, 1, -1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.proj(hidden).tanh()


class ShiftBeforeHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.shift = Shift()
        self.head = nn.Linear(16, 50)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.shift(hidden))


def test_a_module_before_the_head_that_mixes_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    graph = convert(ShiftBeforeHead().eval(), MoDConfig(capacity=0.5, layers=(1,)))
    to_onnx(graph, tmp_path / "bundle", length=LENGTH, routing="topk")
    ids = torch.randint(50, (1, LENGTH))
    got = load_engine(tmp_path / "bundle")(ids.numpy())
    torch.testing.assert_close(torch.from_numpy(got), graph(ids).logits[:, -1:].detach(), atol=1e-5, rtol=0)

    # A pass that is wrong there is found out: the reference did not go through it.
    monkeypatch.setattr(keep_last_logits, "_try_out", lambda *args: None)
    for routing in ("topk", "predictor", "dense"):
        with pytest.raises(ExportError, match="ONNX Runtime and the eager PyTorch graph differ"):
            to_onnx(graph, tmp_path / routing, length=LENGTH, routing=routing)


def test_an_error_in_route_by_predictor_is_found(
    graphs: dict[str, fx.GraphModule], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RouteByPredictor.call

    def wrong(self: RouteByPredictor, graph_module: fx.GraphModule) -> object:
        result = right(self, graph_module)
        for node in graph_module.graph.find_nodes(op="call_function", target=select_predicted):
            node.update_arg(4, LENGTH // 2)  # keep_first
        return result

    monkeypatch.setattr(RouteByPredictor, "call", wrong)
    with pytest.raises(ExportError, match="ONNX Runtime and the eager PyTorch graph differ"):
        to_onnx(graphs["llama"], tmp_path / "bundle", length=LENGTH)


def test_real_text_is_compared_on_where_there_is_a_tokenizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        vocab_size=260,
        max_position_embeddings=64,
    )
    graph = convert(LlamaForCausalLM(config).eval(), MoDConfig(capacity=0.25))
    byte_tokenizer().save_pretrained(tmp_path / "checkpoint")

    def kinds(out: str, **options: object) -> set[str]:
        report = to_onnx(graph, tmp_path / out, length=LENGTH, source=tmp_path / "checkpoint", **options)
        return {parity.inputs for parity in report.manifest.parity}

    assert kinds("prose", padding=True) == {"random", "random, padded", "prose", "prose, padded"}
    assert kinds("text", verify_inputs=range(50)) == {"random", "text"}

    small = convert(llama().eval(), MoDConfig(capacity=0.25))
    with pytest.raises(
        ExportError, match="the checkpoint's tokenizer gives token ids outside the vocabulary of 99"
    ):
        to_onnx(small, tmp_path / "small", length=LENGTH, source=tmp_path / "checkpoint")

    (tmp_path / "checkpoint" / "tokenizer.json").write_text("{}")
    assert kinds("damaged") == {"random"}


def test_weights_are_stored_once_and_nothing_else_is(
    graphs: dict[str, fx.GraphModule], tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    for name in ("tokenizer.json", "generation_config.json", "config.json"):
        (source / name).write_text("{}")
    stages: list[str] = []
    out = tmp_path / "bundle"
    report = to_onnx(graphs["llama"], out, length=LENGTH, source=source, progress=stages.append)
    assert stages == [
        "lowering",
        "exporting",
        "checking operators",
        "comparing with PyTorch",
        "writing",
    ]
    assert list(report.seconds) == stages
    assert sorted(report.manifest.files) == [
        "generation_config.json",
        "model.onnx",
        "model.onnx.data",
        "tokenizer.json",
    ]
    json.dumps(report.to_dict())
    weights = sum(p.numel() * 4 for p in graphs["llama"].parameters())
    assert (
        report.manifest.files["model.onnx.data"].bytes < weights + 60_000
    )  # small constants beside the weights
    text = (out / "model.onnx").read_bytes()
    assert b"site-packages" not in text
    assert b"stack_trace" not in text
    model = onnx.load(out / "model.onnx", load_external_data=False)
    assert [value.name for value in model.graph.output] == ["logits"]
    assert {opset.version for opset in model.opset_import if opset.domain == ""} == {20}


def test_a_failed_check_leaves_nothing(graphs: dict[str, fx.GraphModule], tmp_path: Path) -> None:
    graph = graphs["llama"].train()
    with pytest.raises(ExportError, match="not because of near-ties in the selection: given the same scores"):
        to_onnx(graph, tmp_path / "new" / "bundle", length=LENGTH, tolerance=0.0)
    assert list(tmp_path.iterdir()) == []
    assert all(module.training for module in graph.modules())
    graph.eval()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError(errno.ENOSPC, "No space left on device"), StorageError),
    ],
)
def test_an_interrupted_export_leaves_nothing(
    graphs: dict[str, fx.GraphModule],
    tmp_path: Path,
    error: BaseException,
    expected: type[BaseException],
) -> None:
    def stop(stage: str) -> None:
        if stage == "exporting":
            assert any(tmp_path.iterdir())
            raise error

    with pytest.raises(expected):
        to_onnx(graphs["llama"], tmp_path / "bundle", length=LENGTH, progress=stop)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"routing": "oracle"}, "routing must be one of predictor, topk, dense, got 'oracle'"),
        ({"logits": "first"}, "logits must be one of last, all, got 'first'"),
        ({"length": 1}, "length must be an integer of at least 2, got 1"),
        ({"batch": 0}, "batch must be an integer of at least 1, got 0"),
        ({"length": 65}, "length 65 exceeds the 64 positions of the model's context"),
        ({"source": "/nonexistent"}, "source /nonexistent is no directory"),
        ({"verify_inputs": []}, "verify_inputs must hold token ids"),
        ({"verify_inputs": [1, 99]}, "token ids outside the vocabulary of 99"),
    ],
)
def test_wrong_options_are_named(
    graphs: dict[str, fx.GraphModule], tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        to_onnx(graphs["llama"], tmp_path / "bundle", **{"length": LENGTH, **options})
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_refused(graphs: dict[str, fx.GraphModule], tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="already exists"):
        to_onnx(graphs["llama"], tmp_path, length=LENGTH)


def test_models_that_cannot_be_exported(graphs: dict[str, fx.GraphModule], tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    dense = graphs["llama"].meta["dense_graph"]
    with pytest.raises(ExportError, match="needs routed blocks, and the graph has none"):
        to_onnx(dense, out, length=LENGTH, routing="topk")
    with pytest.raises(ExportError, match="LlamaForCausalLM has no graph; give a MoDForCausalLM"):
        to_onnx(llama(), out, length=LENGTH)
    with pytest.raises(ExportError, match=r"routers\.0 routes at random"):
        to_onnx(converted(llama, routing="random"), out, length=LENGTH, routing="topk")
    half = convert(llama().to(torch.bfloat16).eval(), MoDConfig(capacity=0.25))
    with pytest.raises(ExportError, match="is bfloat16; load the model in float32"):
        to_onnx(half, out, length=LENGTH)
    assert list(tmp_path.iterdir()) == []


def test_weights_on_the_meta_device_are_refused(tmp_path: Path) -> None:
    graph = converted(llama)
    graph.get_submodule("model.layers.1").to("meta")
    with pytest.raises(ExportError, match=r"parameter model\.layers\.1\..* is on the meta device"):
        to_onnx(graph, tmp_path / "bundle", length=LENGTH)
