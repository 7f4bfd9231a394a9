"""Options and fixtures for all tests."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

# Before torch is imported: idle threads that spin make small tests many times slower on shared cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if "PYTEST_XDIST_WORKER" in os.environ:  # test processes side by side, each on one core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden instead of comparing with it"
    )


@pytest.hookimpl(tryfirst=True)  # before -k selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and (reason := _why_no_gpu()):
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason=reason))
    for item in items:
        if "golden" in getattr(item, "fixturenames", ()):
            item.extra_keyword_matches.add("golden")


def _why_no_gpu() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "needs an NVIDIA GPU (torch.cuda.is_available() is false)"


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with tests/golden/<name>.txt; `--update-golden` rewrites that file."""
    update = request.config.getoption("--update-golden")

    def check(name: str, text: str) -> None:
        __tracebackhide__ = True
        path = GOLDEN / f"{name}.txt"
        got = text.rstrip("\n") + "\n"
        want = path.read_text(encoding="utf-8") if path.exists() else None
        if got == want:
            return
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(got, encoding="utf-8")
            return
        if want is None:
            pytest.fail(
                f"tests/golden/{name}.txt does not exist: run `make golden` and read what it wrote",
                pytrace=False,
            )
        diff = difflib.unified_diff(
            want.splitlines(keepends=True), got.splitlines(keepends=True), f"golden/{name}.txt", "this run"
        )
        pytest.fail(
            "".join(diff) + "\nIf the change is meant: make golden, then read the diff.", pytrace=False
        )

    return check


def _tiny(kind: str, **options: Any) -> nn.Module:
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        **sizes,
        num_hidden_layers=3,
        vocab_size=99,
        max_position_embeddings=128,
        initializer_range=0.2,
        **options,
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


@pytest.fixture(scope="session")
def tiny_llama() -> nn.Module:
    """A Llama of three blocks, 32 wide; plain causal attention."""
    return _tiny("Llama")


@pytest.fixture(scope="session")
def tiny_qwen() -> nn.Module:
    """A Qwen 2 of three blocks; the first two see four tokens, the last one sees all."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    return _tiny("Qwen2", use_sliding_window=True, sliding_window=4, layer_types=kinds)


@pytest.fixture(scope="session")
def padded_batch() -> Callable[..., tuple[Tensor, Tensor]]:
    """`padded_batch(length=13)` returns token ids `[3, length]` and a mask of whole, half and almost no real tokens."""
    import torch

    def make(length: int = 13) -> tuple[Tensor, Tensor]:
        ids = torch.randint(1, 99, (3, length), generator=torch.Generator().manual_seed(0))
        return ids, (torch.arange(length) < torch.tensor([[length], [length // 2], [1]])).long()

    return make


# Graphs are shared between tests: rewrite them with `run_passes`, which works on a copy.


@pytest.fixture(scope="session")
def llama_graph(tiny_llama: nn.Module) -> fx.GraphModule:
    """`tiny_llama`, captured."""
    from modify.capture import capture

    return capture(tiny_llama)


@pytest.fixture(scope="session")
def qwen_graph(tiny_qwen: nn.Module) -> fx.GraphModule:
    """`tiny_qwen`, captured."""
    from modify.capture import capture

    return capture(tiny_qwen)


@pytest.fixture(scope="session")
def llama_routed(llama_graph: fx.GraphModule) -> fx.GraphModule:
    """`llama_graph` through CONVERT: block 1 runs half of the tokens."""
    return _convert(llama_graph, (1, 0.5))


@pytest.fixture(scope="session")
def qwen_routed(qwen_graph: fx.GraphModule) -> fx.GraphModule:
    """`qwen_graph` through CONVERT: blocks 1 (window) and 2 (no window) run half of the tokens."""
    return _convert(qwen_graph, (1, 0.5), (2, 0.5))


def _convert(graph: fx.GraphModule, *layers: tuple[int, float]) -> fx.GraphModule:
    from modify.passes.pipelines import CONVERT, build
    from modify.passes.runner import run_passes

    options = {"layers": layers, "optional_mask": frozenset({0, 1, 2}), "predictor_hidden": 8}
    return run_passes(graph, build(CONVERT, options))[0]


@pytest.fixture
def rewrite() -> Callable[..., fx.GraphModule]:
    """`rewrite(graph, *passes)` runs passes; each must change the graph, and change nothing when it runs again."""
    from modify.passes.printing import print_graph
    from modify.passes.runner import run_passes

    def run(graph: fx.GraphModule, *passes: Any) -> fx.GraphModule:
        for graph_pass in passes:
            graph, reports = run_passes(graph, [graph_pass])
            assert reports[0].modified, f"{graph_pass.name} changed nothing"
            again, reports = run_passes(graph, [graph_pass])
            assert not reports[0].modified, f"{graph_pass.name} changed its own result"
            assert print_graph(again.graph) == print_graph(graph.graph)
        return graph

    return run


@pytest.fixture
def untouched() -> Callable[..., tuple[str, ...]]:
    """`untouched(graph, pass)` asserts that a pass leaves a graph as it is, and returns its reasons."""
    from modify.passes.printing import print_graph
    from modify.passes.runner import run_passes

    def run(graph: fx.GraphModule, graph_pass: Any) -> tuple[str, ...]:
        before = print_graph(graph.graph)
        after, (report,) = run_passes(graph, [graph_pass])
        assert not report.modified
        assert print_graph(after.graph) == before
        assert dict(after.named_modules()).keys() == dict(graph.named_modules()).keys()
        return tuple(skip.reason for skip in report.skips)

    return run
