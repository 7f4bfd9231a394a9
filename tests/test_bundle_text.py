"""Text from a bundle: the tokenizer and chat template as transformers has them, without transformers."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import jinja2
import pytest
from checkpoints import byte_tokenizer
from generation_bundle import continuation, write_bundle
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from modify.errors import ConfigError, ExportError
from modify.export import BundleTokenizer, GenerationEngine, generate_text, load_engine

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}!"
PROMPT = '#"*$'  # tokens 3, 2, 10, 4 of the hand-made model's 11
IDS = [3, 2, 10, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    bundle = write_bundle(folder / "bundle", companions=folder / "tokenizer")
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in bundle.iterdir()}
    return bundle


@pytest.fixture(scope="module")
def engine(folder: Path) -> GenerationEngine:
    loaded = load_engine(folder)
    assert isinstance(loaded, GenerationEngine)
    return loaded


def test_text_is_that_of_the_tokens(engine: GenerationEngine) -> None:
    pieces: list[str] = []
    result = generate_text(engine, PROMPT, max_new_tokens=12, on_text=pieces.append)
    expected = continuation(IDS, 12)
    end = expected.index(7) + 1 if 7 in expected else 12
    assert result.text == "".join(pieces) == byte_tokenizer().decode(expected[:end], skip_special_tokens=True)
    assert (result.prompt, result.prompt_tokens, result.new_tokens) == (PROMPT, 4, end)
    assert len(result.steps) == end
    assert result.steps[0].tokens == 4
    assert result.overflow == 1 + expected[: end - 1].count(10)
    chat = generate_text(engine, PROMPT, chat=True, max_new_tokens=1)
    assert chat.prompt == PROMPT + "!"


def test_options_and_prompts_that_do_not_fit(engine: GenerationEngine) -> None:
    with pytest.raises(ConfigError, match="top_p"):
        generate_text(engine, PROMPT, top_p=2.0)
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generate_text(engine, "")
    with pytest.raises(ConfigError, match="exceed the bundle's length of 600; shorten the prompt"):
        generate_text(engine, "#" * 601)
    with pytest.raises(ConfigError, match="prompt must be text, not list; give one prompt at a time"):
        generate_text(engine, [PROMPT])  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match="takes what load_engine made of a generation bundle, not PosixPath"
    ):
        generate_text(engine.folder, PROMPT)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="threads must be an integer of at least 1, got 0"):
        load_engine(engine.folder, threads=0)


def test_characters_of_several_tokens_are_streamed_whole(folder: Path) -> None:
    tokenizer, text = BundleTokenizer(folder), "née 東京 🙂!"
    ids = tokenizer.encode(text)
    assert ids == byte_tokenizer()(text)["input_ids"]
    pieces: list[str] = []
    stream = tokenizer.decode_stream(pieces.append)
    for token in ids:
        stream.add(token)
    assert stream.finish() == "".join(pieces) == text
    assert pieces == list(text)
    cut = tokenizer.decode_stream(pieces.append)
    for token in ids[:-3]:  # in the midst of the smiley
        cut.add(token)
    assert cut.finish() == tokenizer.decode(ids[:-3])


def test_the_stream_s_text_is_that_of_all_tokens(tmp_path: Path) -> None:
    """Every sequence of up to four tokens of a byte-fallback tokenizer, bytes that are no characters among them."""
    tokens = ["<eos>", "\u2581a", "\u2581", "b", "<0x0A>", "<0xC3>", "<0xA9>", "<0xF0>"]
    model = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True))
    model.add_special_tokens(["<eos>"])
    model.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = BundleTokenizer(tmp_path)
    for count in range(1, 5):
        for ids in itertools.product(range(len(tokens)), repeat=count):
            pieces: list[str] = []
            stream = tokenizer.decode_stream(pieces.append)
            for token in ids:
                stream.add(token)
            assert stream.finish() == "".join(pieces) == tokenizer.decode(ids)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n  {%- if loop.index > 1 %}{% break %}{% endif %}\n<{{ m.role }}>"
        "{{ m['content'] | trim }}{{ eos_token }}\n{% endfor %}\n{% if add_generation_prompt %}<assistant>{% endif %}",
        "{% set d = dict(a=1) %}{{ messages | tojson }}{{ {'ä': '<'} | tojson(indent=2) }}{{ d.a }}",
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
        "{% if tools %}no{% endif %}{% set ns = namespace(n=0) %}{% set ns.n = 2 %}{{ ns.n }}{{ strftime_now('%Y') }}",
    ],
)
def test_chat_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = "<eos>"
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    messages = [{"role": "user", "content": " <Hé> "}, {"role": "user", "content": "again"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert BundleTokenizer(tmp_path).chat(messages) == expected
    # As older tokenizers keep it: among several, in the config.
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "other", "template": "x"}, {"name": "default", "template": template}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    assert BundleTokenizer(tmp_path).chat(messages) == expected


def test_templates_cannot_reach_out(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    messages = [{"role": "user", "content": "x"}]
    for template, error, message in (
        ("{{ raise_exception('roles must alternate') }}", ConfigError, "refuses the messages: roles must"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", ConfigError, "refuses the messages: access to"),
        ("{{ messages.append(1) }}", ConfigError, "refuses the messages"),
        ("{% for %}", ExportError, "the chat template is damaged"),
        ("{{ 1 + 'a' }}", ConfigError, "refuses the messages: unsupported operand"),
        ("{% for x in 5 %}{% endfor %}", ConfigError, "refuses the messages: 'int' object is not iterable"),
        ("{{ 1 / 0 }}", ConfigError, "refuses the messages: division by zero"),
    ):
        (tmp_path / "chat_template.jinja").write_text(template)
        with pytest.raises(error, match=message):
            BundleTokenizer(tmp_path).chat(messages)


def test_damaged_templates_are_named(tmp_path: Path) -> None:
    byte_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    for template, message in (
        ([{"name": "x"}], "cannot be read: 'template'"),
        (["x"], "cannot be read: string indices"),
        (5, "is no text, but 5"),
    ):
        path.write_text(json.dumps(config | {"chat_template": template}))
        with pytest.raises(ExportError, match=f"the chat template {message}"):
            BundleTokenizer(tmp_path).chat([])
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ExportError, match="the chat template cannot be read: 'utf-8' codec"):
        BundleTokenizer(tmp_path).chat([])


def test_what_is_missing_is_named(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExportError, match=r"has no tokenizer\.json; .* token ids"):
        BundleTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ExportError, match=r"tokenizer\.json cannot be read"):
        BundleTokenizer(tmp_path)
    PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer().backend_tokenizer).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no chat template"):
        BundleTokenizer(tmp_path).chat([])
    tokenizer = BundleTokenizer(folder)
    with monkeypatch.context() as patch:
        patch.setattr(jinja2, "__version__", "3.1.5")
        with pytest.raises(
            ExportError, match=r"found 3\.1\.5; install it with: pip install -U 'jinja2>=3\.1\.6'"
        ):
            tokenizer.chat([])
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ExportError, match=r"need jinja2 .*install it with: pip install 'jinja2>=3\.1\.6'"):
        tokenizer.chat([])
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ExportError, match="install it with: pip install tokenizers"):
        BundleTokenizer(folder)


def test_text_needs_neither_torch_nor_transformers(folder: Path) -> None:
    code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None  # importing them fails
from modify.cli import main
sys.exit(main(["generate", {str(folder)!r}, "--chat", "--prompt", "#", "--max-new-tokens", "3", "--stats"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "blocks run" in done.stdout
