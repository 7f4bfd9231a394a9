"""Text for a bundle's runtime: its tokenizer and chat template, without transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from modify.errors import ConfigError, ExportError, first_line
from modify.export.bundle import AGAIN, read_json
from modify.generation_checks import TEMPLATE_ERRORS

_JINJA = "jinja2>=3.1.6"  # older ones let a template out of the sandbox
_UNFINISHED = "\ufffd"  # how bytes read that are no whole character
_BYTE = re.compile(
    "<0x[0-9A-F]{2}>"
)  # a token of byte fallback; one wrong byte makes all of a run unreadable


class BundleTokenizer:
    """The tokenizer of a bundle, and its chat template."""

    def __init__(self, bundle: Path) -> None:
        """Read them.

        Raises:
            ExportError: there is no `tokenizer.json`, it is damaged, or the package `tokenizers` is missing.
        """
        self.bundle = bundle
        path = bundle / "tokenizer.json"
        if not path.is_file():
            raise ExportError(
                f"{bundle} has no tokenizer.json; export a checkpoint that has one, or give the engine token ids"
            )
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ExportError(
                f"text needs the package tokenizers ({first_line(error)}); install it with: pip install tokenizers"
            ) from error
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more special
            raise ExportError(f"{path} cannot be read: {first_line(error)}; {AGAIN}") from error
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.config = read_json(bundle / "tokenizer_config.json")

    @property
    def special_tokens(self) -> dict[str, str]:
        """The texts of `bos_token`, `eos_token`, .., by these names."""
        named = read_json(self.bundle / "special_tokens_map.json") | self.config
        texts = {
            name: value["content"] if isinstance(value, Mapping) and "content" in value else value
            for name, value in named.items()
            if name.endswith("_token")
        }
        return {name: text for name, text in texts.items() if isinstance(text, str)}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the ids of a text; `special`: with those that the tokenizer puts around it. Of no text, the first.

        Raises:
            ConfigError: the text has no token.
        """
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        if ids:
            return ids
        first = self.tokenizer.token_to_id(self.special_tokens.get("bos_token", ""))
        if first is None:
            raise ConfigError("the prompt is empty; give at least one token to continue")
        return [first]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special ones."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def decode_stream(self, on_text: Callable[[str], None]) -> TextStream:
        """Return what hands on the text of tokens that come one by one."""
        return TextStream(self, on_text)

    def chat(self, messages: Iterable[Mapping[str, str]]) -> str:
        """Put messages, each with `role` and `content`, into the chat template, ready for the answer.

        Raises:
            ConfigError: there is no template, or it refuses the messages.
            ExportError: jinja2 is missing, or the template is damaged.
        """
        template = self._template()
        if not template:
            raise ConfigError(
                "the tokenizer has no chat template; leave out chat, and write the prompt in full"
            )
        environment, errors = _sandbox()
        try:
            compiled = environment.from_string(template)
        except errors.TemplateError as error:
            raise ExportError(f"{self.bundle}: the chat template is damaged: {first_line(error)}") from error
        try:
            return str(
                compiled.render(
                    messages=list(messages),
                    tools=None,
                    documents=None,
                    add_generation_prompt=True,
                    **self.special_tokens,
                )
            )
        except (errors.TemplateError, *TEMPLATE_ERRORS) as error:
            raise ConfigError(f"the chat template refuses the messages: {first_line(error)}") from error

    def _template(self) -> str | None:
        path = self.bundle / "chat_template.jinja"
        try:
            if path.is_file():
                return path.read_text(encoding="utf-8")
            template = self.config.get("chat_template")
            if isinstance(template, list):  # several, by name
                template = {entry["name"]: entry["template"] for entry in template}.get("default")
        except (OSError, UnicodeDecodeError, LookupError, TypeError) as error:
            raise ExportError(
                f"{self.bundle}: the chat template cannot be read: {first_line(error)}"
            ) from error
        if not isinstance(template, str | None):
            raise ExportError(f"{self.bundle}: the chat template is no text, but {template!r}")
        return template


class TextStream:
    """Hands on text as soon as it is final: not in the midst of a character of several tokens."""

    def __init__(self, tokenizer: BundleTokenizer, on_text: Callable[[str], None]) -> None:
        self.tokenizer, self.on_text = tokenizer, on_text
        self.ids: list[int] = []
        self.shown = ""
        # The text of ids[start:] is decoded anew for every token, since how a token reads depends on those before it
        # (a leading space, the bytes of a character); that of ids[start:done] has been handed on.
        self._start = self._done = 0
        added = tokenizer.tokenizer.get_added_tokens_decoder()
        self._special = {index for index, entry in added.items() if entry.special}  # which have no text

    def add(self, token: int) -> None:
        """Take the next token."""
        self.ids.append(token)
        if token in self._special or _BYTE.fullmatch(self.tokenizer.tokenizer.id_to_token(token) or ""):
            return
        before = self.tokenizer.decode(self.ids[self._start : self._done])
        text = self.tokenizer.decode(self.ids[self._start :])
        if len(text) > len(before) and text.startswith(before) and not text.endswith(_UNFINISHED):
            self._show(text[len(before) :])
            self._start, self._done = self._done, len(self.ids)

    def finish(self) -> str:
        """Hand on what is left, and return the whole text."""
        text = self.tokenizer.decode(self.ids)
        if text.startswith(self.shown):
            self._show(text[len(self.shown) :])
        return text

    def _show(self, piece: str) -> None:
        if piece:
            self.shown += piece
            self.on_text(piece)


def _sandbox() -> tuple[Any, Any]:
    """Return an environment for templates by others, as transformers sets it up, and jinja2's exceptions."""
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        raise ExportError(
            f"chat templates need jinja2 ({first_line(error)}); install it with: pip install '{_JINJA}'"
        ) from error
    if tuple(int(part) for part in jinja2.__version__.split(".")[:3]) < (3, 1, 6):
        raise ExportError(
            f"chat templates need {_JINJA}, found {jinja2.__version__}; install it with: pip install -U '{_JINJA}'"
        )

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's part for training; here it means nothing."""

        tags = {"generation"}  # noqa: RUF012 jinja2's interface

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)  # jinja2's own escapes HTML

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": refuse,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *args, **kwargs: dict(*args, **kwargs),  # not the class, whose attributes lead further
    }
    return environment, jinja2
