"""Text in, rows of token ids out: what retraining and evaluation run on.

Files are opened with the standard library, not with `datasets.load_dataset`. That was measured first: it reads `.gz`,
`.xz` and `.bz2` as fast, but loses what an error message needs (the file, the line, the byte), turns a missing field
into `None`, takes a bracket in a file's name for a glob and then yields nothing, and leaves lock files in the user's
cache. So text and JSONL need no extra; a `datasets` object is taken as it is, by its rows.

Long documents are tokenised in chunks of about 64 thousand characters (`split_document`): 4 million tokens of
SmolLM2's tokenizer, one document, took 8 s and 0.2 GB on two cores, against 20 s and 2.6 GB whole, and were equal.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import itertools
import json
import lzma
import os
import re
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from modify.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Source = str | os.PathLike[str]

OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
CHUNK = 1 << 16  # characters
BATCH = 1 << 20  # characters given to the tokenizer in one call, which spreads the chunks over the cores

# Where a cut changes no token: after a lone newline that stands between two non-blank lines, or before the newline
# after a letter or digit. Byte-level BPE's pre-tokenizers (GPT-2's and GPT-4's patterns) split there in any case.
CUT = re.compile(r"(?<=\S\n)(?=\S)|(?<=[^\W_])(?=\n)")


class PackedDataset(Dataset[dict[str, torch.Tensor]]):
    """A token stream cut into rows of `length` tokens; the shorter tail is dropped.

    Map-style, so that a `Trainer` shuffles it by seed and resumes. An item is a dict of two int64 tensors of shape
    `[length]`: `input_ids` and `labels`, a copy (the model shifts them). `rows` is the store, int32, `[N, length]`.

    Raises `DataError` when the stream, called `name` there, is shorter than one row, or `length` is below 2.
    """

    def __init__(self, tokens: np.ndarray, length: int, name: str = "the data") -> None:
        if length < 2:
            raise DataError(f"length={length}: a row needs at least 2 tokens, since each predicts the next")
        if len(tokens) < length:
            found = f"{name} has {len(tokens)} tokens, and one row needs {length}"
            raise DataError(f"{found}: give more text or a smaller length")
        count = len(tokens) // length
        self.length = length
        self.rows = torch.from_numpy(np.array(tokens[: count * length], dtype=np.int32)).view(count, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = self.rows[index]
        return {"input_ids": row.long(), "labels": row.long()}


class RepeatedShuffle(Sampler[int]):
    """`total` indices into `rows` rows: one shuffle of all rows after another, each drawn from `seed` and its number.

    So the rows that a step of a given size trains on follow from the seed and the number of the step alone, not from
    how they are divided into batches, processes and accumulated passes.
    """

    def __init__(self, rows: int, total: int, seed: int) -> None:
        self.rows, self.total, self.seed = rows, total, seed

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, self.total, self.rows):
            generator = torch.Generator().manual_seed(self.seed + begin // self.rows)
            order = torch.randperm(self.rows, generator=generator).tolist()
            yield from order[: self.total - begin]


def read_texts(sources: Source | Iterable[Source], *, text_field: str = "text") -> Iterator[str]:
    """The documents in files, in the order of `sources`.

    A source is a path, a glob (`**` goes into subfolders; its matches are sorted), or `pydoc`: the prose that ships
    with Python (`pydoc_data.topics`). A file named twice is read once. A file is one document of UTF-8 text, or, when
    its name ends in `.jsonl` or `.json`, one document a line: the string in `text_field` of a JSON object. Either may
    be compressed (`.gz`, `.xz`, `.bz2`). A byte order mark is dropped; line ends become a newline.

    Raises `DataError` at once for a source that is missing, a folder, or a glob without a match; while reading for a
    file that is damaged, not UTF-8, or not JSONL with that field.
    """
    files = _find_files([sources] if isinstance(sources, str | os.PathLike) else sources)
    return (text for path in files for text in _read_file(path, text_field))


def pack(
    data: Any,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    *,
    text_field: str = "text",
    limit_tokens: int | None = None,
) -> PackedDataset:
    """Tokenise `data` and cut it into rows of `length` tokens.

    `data` is one of:

    1. a path, a glob or `pydoc`, or a list or tuple of them: see `read_texts`;
    2. any other iterable of strings, each a document (`iter(texts)` for a list of them);
    3. rows with a string in `text_field`: a `datasets.Dataset` or `IterableDataset`, or a list of dicts;
    4. rows that are tokenised already, with `input_ids` (and `attention_mask`, whose zeros are left out).

    The tokenizer's end-of-sequence token, where it has one, goes between documents (cases 1 to 3); no other special
    token is added, and a document without tokens is skipped. Case 4 is packed as it is, with nothing in between.
    Reading stops after `limit_tokens` tokens.

    Raises `DataError` for data that cannot be read or has fewer tokens than one row.
    """
    if length > 1 and limit_tokens is not None and limit_tokens < length:
        raise DataError(f"limit_tokens={limit_tokens} is less than one row of {length} tokens: raise it")
    name = "the data"
    if isinstance(data, str | os.PathLike):
        data = [data]
    if isinstance(data, list | tuple) and all(isinstance(item, str | os.PathLike) for item in data):
        name = textwrap.shorten(", ".join(map(str, data)), 80) or "an empty list"
        data = read_texts(data, text_field=text_field)
    pieces = [np.empty(0, np.int32)]
    total = 0
    for piece in _token_stream(data, tokenizer, text_field) if length > 1 else ():
        pieces.append(piece)
        total += len(piece)
        if limit_tokens is not None and total >= limit_tokens:
            break
    return PackedDataset(np.concatenate(pieces)[:limit_tokens], length, name)


def split_document(text: str) -> list[str]:
    """Cut a long document into chunks of at least `CHUNK` characters, for speed; they join to the document.

    The cut is the first one (`CUT`) that changes no token of a byte-level BPE, else the next newline, else none. A
    tokenizer that marks the start of its input (SentencePiece's leading space) differs in one token per chunk.
    """
    chunks = []
    start = 0
    while len(text) - start > CHUNK:
        cut = CUT.search(text, start + CHUNK, start + 2 * CHUNK)
        end = cut.start() if cut else text.find("\n", start + CHUNK)
        if end < 0:
            break
        chunks.append(text[start:end])
        start = end
    return [*chunks, text[start:]]


def _find_files(sources: Iterable[Source]) -> list[str | None]:
    """The files that the sources name, each once; None stands for `pydoc`."""
    found: dict[str, str | None] = {}  # by real path
    for source in sources:
        path = os.path.expanduser(os.fspath(source))
        shown = repr(path if len(path) <= 80 else path[:77] + "...")
        matches: list[str | None] = [path]
        if source == "pydoc":
            matches = [None]
        elif os.path.isdir(path):
            example = os.path.join(path, "**", "*.txt")
            raise DataError(f"{shown} is a folder: give a file, or a glob such as {example!r}")
        elif not os.path.exists(path) and not any(mark in path for mark in "*?["):
            hint = "a list holds paths, globs or 'pydoc'; pass documents themselves as iter(documents)"
            raise DataError(f"no such file: {shown}: check the path ({hint})")
        elif not os.path.exists(path):
            matches = [match for match in sorted(glob.glob(path, recursive=True)) if not os.path.isdir(match)]
            if not matches:
                raise DataError(f"no file matches {shown}: check the pattern, and quote it in a shell")
        for match in matches:
            found.setdefault(os.path.realpath(match) if match else "", match)
    return list(found.values())


def _read_file(path: str | None, text_field: str) -> Iterator[str]:
    if path is None:
        from pydoc_data.topics import topics

        yield from (topics[name] for name in sorted(topics))
        return
    stem, suffix = os.path.splitext(path.lower())
    is_jsonl = (stem if suffix in OPENERS else path.lower()).endswith((".jsonl", ".json"))
    try:
        with OPENERS.get(suffix, open)(path, "rb") as file:
            if is_jsonl:
                yield from _read_jsonl(file, path, text_field)
            else:
                yield _decode(file.read(), path, 0).replace("\r\n", "\n").replace("\r", "\n")
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        raise DataError(f"{path}: not a whole {suffix} file ({error}): fetch or compress it again") from error


def _decode(data: bytes, path: str, offset: int) -> str:
    """`data` as text; `offset` is its place in the file."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff" if offset == 0 else "")
    except UnicodeDecodeError as error:
        place = f"byte {offset + error.start} (0x{data[error.start]:02x})"
        hint = "convert it (a compressed file's name must end in .gz, .xz or .bz2)"
        raise DataError(f"{path}: not valid UTF-8 at {place}: {hint}") from error


def _read_jsonl(file: IO[bytes], path: str, text_field: str) -> Iterator[str]:
    offset = 0
    for number, data in enumerate(file, 1):
        line = _decode(data, path, offset).strip()
        offset += len(data)
        if not line:
            continue
        where = f"{path}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: not JSON ({getattr(error, 'msg', error)}): write one object a line"
            ) from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: found {type(record).__name__}, not an object: write one object a line")
        yield _document(record, text_field, where)


def _document(row: Any, text_field: str, where: str) -> str:
    """The text of a row, or the row itself if it is text."""
    text = row
    if isinstance(row, Mapping):
        if text_field not in row:
            fields = ", ".join(map(repr, row)) or "none"
            raise DataError(f"{where}: no field {text_field!r}, its fields are {fields}: set the text field")
        text = row[text_field]
        where += f", field {text_field!r}"
    if not isinstance(text, str):
        raise DataError(f"{where}: found {type(text).__name__}, not a string: leave it out or convert it")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: a lone surrogate at character {error.start}: remove it") from error
    return text


def _token_stream(data: Any, tokenizer: PreTrainedTokenizerBase, text_field: str) -> Iterator[np.ndarray]:
    """The tokens of documents or rows, in int32 pieces."""
    # A DatasetDict would iterate over the names of its splits.
    if isinstance(data, Mapping) or not (hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
        kind = type(data).__name__
        raise DataError(f"{kind} is not data: give paths, documents or rows (of a DatasetDict, one split)")
    rows = iter(data)
    first = list(itertools.islice(rows, 1))
    rows = itertools.chain(first, rows)
    if first and isinstance(first[0], Mapping) and "input_ids" in first[0]:
        yield from map(_given_ids, rows, itertools.count())
        return
    eos = tokenizer.eos_token_id
    separator = np.array([] if eos is None else [eos], np.int32)
    last = None  # the latest document that had tokens
    documents = (_document(row, text_field, f"document {number}") for number, row in enumerate(rows))
    for batch in _batches(documents):
        texts = [chunk for _, chunk in batch]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for (number, _), ids in zip(batch, encoded["input_ids"], strict=True):
            if ids:
                if last is not None and last != number:
                    yield separator
                last = number
                yield np.array(ids, np.int32)


def _batches(documents: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """Chunks with the number of their document, in batches of about `BATCH` characters."""
    batch: list[tuple[int, str]] = []
    size = 0
    for number, text in enumerate(documents):
        for chunk in split_document(text):
            batch.append((number, chunk))
            size += len(chunk)
            if size >= BATCH:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _given_ids(row: Mapping[str, Any], number: int) -> np.ndarray:
    ids = np.asarray(row.get("input_ids"))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        found = f"input_ids has shape {list(ids.shape)} and type {ids.dtype}"
        raise DataError(f"row {number}: {found}: give one list of whole numbers a row")
    if row.get("attention_mask") is not None:
        ids = ids[np.asarray(row["attention_mask"], dtype=bool)]
    return ids.astype(np.int32)
