"""Reading texts and packing them: exact rows, every way to give data, and one clear line for every mistake."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from modify import data as data_module
from modify.data import PackedDataset, RepeatedShuffle, Source, pack, read_texts, split_document
from modify.errors import DataError

EOS = 256


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level with GPT-2's pre-tokenizer and four merges, so that a cut in a wrong place shows."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)} | {"<eos>": EOS}
    merges = [("Ċ", "Ċ"), ("Ġ", "Ġ"), ("Ġ", "t"), ("Ċ", "Ġ")]
    vocab |= {left + right: 257 + number for number, (left, right) in enumerate(merges)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Eight documents in six files, by sorted path: three texts, then one text and two JSONL files in a subfolder."""
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfalpha\r\nbeta\rend\n")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress("gz döc".encode()))
    (tmp_path / "c.txt.xz").write_bytes(lzma.compress(b"xz"))
    (tmp_path / "sub/d.txt.bz2").write_bytes(bz2.compress(b"bz2"))
    (tmp_path / "sub/e.jsonl").write_text('{"text": "one", "n": 1}\n\n{"text": "two", "body": "B"}\n')
    (tmp_path / "sub/f.JSON.xz").write_bytes(lzma.compress(b'{"text": "three"}\n{"text": "four\\nlines"}'))
    return tmp_path


ALL = ["alpha\nbeta\nend\n", "gz döc", "xz", "bz2", "one", "two", "three", "four\nlines"]


def ids_of(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> list[int]:
    """What `pack` promises, the plain way: EOS between the documents."""
    stream: list[int] = []
    for document in documents:
        stream += ([EOS] if stream else []) + tokenizer(document, add_special_tokens=False)["input_ids"]
    return stream


def error_of(call: Any, *args: Any, **options: Any) -> str:
    def use() -> None:
        result = call(*args, **options)
        if isinstance(result, Iterator):
            list(result)

    with pytest.raises(DataError) as caught:
        use()
    message = str(caught.value)
    assert "\n" not in message
    return message


# Reading


@pytest.mark.parametrize("relative", [False, True])
def test_reads_every_kind_of_file_in_order(
    folder: Path, relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert list(read_texts("**/*" if relative else f"{folder}/**/*")) == ALL


def test_sources_keep_their_order_and_duplicates_are_read_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.symlink(folder / "c.txt.xz", folder / "z.txt.xz")
    monkeypatch.chdir(folder)
    sources: list[Source] = [
        folder / "sub" / "d.txt.bz2",
        "*.xz",
        "c.txt.xz",
        "sub/../sub/d*",
        f"{folder}/a.txt",
    ]
    assert list(read_texts(sources)) == ["bz2", "xz", ALL[0]]


def test_home_and_brackets_in_a_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x[1].txt").write_text("brackets")
    assert list(read_texts("~/x[1].txt")) == ["brackets"]


def test_pydoc_is_the_special_name_and_a_file_of_that_name_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pydoc").write_text("a file")
    topics = list(read_texts("pydoc"))
    assert len(topics) > 50
    assert "assert" in topics[0]
    assert list(read_texts(["./pydoc", "pydoc", "pydoc"])) == ["a file", *topics]
    assert list(read_texts(Path("pydoc"))) == ["a file"]


def test_text_field(folder: Path) -> None:
    path = folder / "g.jsonl"
    path.write_text('{"body": "B", "text": 1}')
    assert list(read_texts(path, text_field="body")) == ["B"]


# Packing


@pytest.mark.parametrize("length", [2, 3, 7, 40])
def test_rows_are_the_token_stream(folder: Path, tokenizer: PreTrainedTokenizerFast, length: int) -> None:
    stream = ids_of(tokenizer, ALL)
    assert EOS in stream
    packed = pack(str(folder / "**/*"), tokenizer, length)
    assert len(packed) == len(stream) // length
    assert packed.rows.shape == (len(packed), length)
    assert packed.rows.dtype == torch.int32
    assert packed.rows.flatten().tolist() == stream[: len(packed) * length]


def test_items(tokenizer: PreTrainedTokenizerFast) -> None:
    packed = pack(iter(["some text"]), tokenizer, 4)
    item = packed[1]
    assert set(item) == {"input_ids", "labels"}
    assert item["input_ids"].dtype == item["labels"].dtype == torch.int64
    assert item["input_ids"].tolist() == item["labels"].tolist() == packed.rows[1].tolist()
    item["labels"].fill_(-100)  # neither the input nor the store may share the memory
    assert item["input_ids"].tolist() == packed.rows[1].tolist() == packed[-1]["input_ids"].tolist()
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_every_form_of_data_gives_the_same_rows(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    want = pack(str(folder / "**/*"), tokenizer, 5).rows
    forms = [
        [folder / "*.*", str(folder / "sub/*")],
        iter(ALL),
        (text for text in ALL),
        dict.fromkeys(ALL).keys(),
        [{"text": text, "other": 1} for text in ALL],
        [{"input_ids": ids_of(tokenizer, ALL), "text": "not this"}],
        pack(iter(ALL), tokenizer, 5),
    ]
    for form in forms:
        assert torch.equal(pack(form, tokenizer, 5).rows, want)
    renamed = [{"body": text, "text": 0} for text in ALL]
    assert torch.equal(pack(renamed, tokenizer, 5, text_field="body").rows, want)


def test_hugging_face_datasets(tokenizer: PreTrainedTokenizerFast) -> None:
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"text": ALL, "n": list(range(len(ALL)))})
    want = pack(iter(ALL), tokenizer, 6).rows
    assert torch.equal(pack(dataset, tokenizer, 6).rows, want)
    assert torch.equal(pack(dataset["text"], tokenizer, 6).rows, want)
    assert torch.equal(pack(dataset.to_iterable_dataset(), tokenizer, 6).rows, want)
    renamed = dataset.rename_column("text", "body")
    assert torch.equal(pack(renamed, tokenizer, 6, text_field="body").rows, want)

    ids = [[1, 2, 3], [], [4, 5, 6, 7]]
    tokens = datasets.Dataset.from_dict({"input_ids": ids})
    for form in (
        tokens,
        tokens.with_format("torch"),
        tokens.with_format("numpy"),
        tokens.to_iterable_dataset(),
    ):
        assert pack(form, tokenizer, 3).rows.tolist() == [[1, 2, 3], [4, 5, 6]]

    message = error_of(pack, datasets.DatasetDict({"train": dataset}), tokenizer, 6)
    assert message == "DatasetDict is not data: give paths, documents or rows (of a DatasetDict, one split)"
    message = error_of(pack, renamed, tokenizer, 6)
    assert message == "document 0: no field 'text', its fields are 'body', 'n': set the text field"


def test_padding_of_tokenised_rows_is_left_out(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [
        {"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]},
        {"input_ids": [0, 3], "attention_mask": [0, 1]},
    ]
    assert pack(rows, tokenizer, 3).rows.tolist() == [[1, 2, 3]]


def test_documents_without_tokens_get_no_separator(tokenizer: PreTrainedTokenizerFast) -> None:
    want = ids_of(tokenizer, ["ab", "cd"])
    assert pack(iter(["", "ab", "", "", "cd", ""]), tokenizer, 5).rows.tolist() == [want]


def test_tokenizer_without_eos_joins_the_documents(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    assert bare.eos_token_id is None
    want = ids_of(tokenizer, ["abcd"])
    assert pack(iter(["ab", "cd"]), bare, 4).rows.tolist() == [want]


def test_limit_tokens_is_exact_and_stops_reading(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_module, "BATCH", 10)
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        while True:
            read += 1
            yield "abcdefg"

    packed = pack(endless(), tokenizer, 4, limit_tokens=23)
    assert len(packed) == 5
    assert read <= 6
    assert torch.equal(packed.rows, pack(iter(["abcdefg"] * 9), tokenizer, 4).rows[:5])


def test_packing_twice_is_equal(tokenizer: PreTrainedTokenizerFast) -> None:
    first, second = (pack("pydoc", tokenizer, 128, limit_tokens=100_000) for _ in range(2))
    assert torch.equal(first.rows, second.rows)


# Chunks

BLOCKS = {
    "lines": "The thing.\nAnd that\n",
    "paragraphs": "A heading\n\nWith its text.\n\n",
    "indented": "def f():\n    the\n\n  \n    there\n\n\n",
    "no letters": "...\n\n\n",
}


@pytest.mark.parametrize("name", BLOCKS)
def test_chunks_join_to_the_document_and_keep_its_tokens(
    name: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = BLOCKS[name] * 20
    whole = ids_of(tokenizer, [text])
    for chunk in (20, 33, 50):
        monkeypatch.setattr(data_module, "CHUNK", chunk)
        chunks = split_document(text)
        assert "".join(chunks) == text
        assert len(chunks) > 1
        assert min(map(len, chunks[:-1])) >= chunk
        packed = pack(iter([text]), tokenizer, 2)
        if name == "no letters":  # nowhere to cut without a change: one token a chunk at most
            assert abs(packed.rows.numel() - len(whole)) <= len(chunks)
        else:
            assert packed.rows.flatten().tolist() == whole[: packed.rows.numel()]


def test_a_document_without_line_ends_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "CHUNK", 10)
    assert split_document("x" * 1000) == ["x" * 1000]
    assert split_document("x" * 1000 + "\n" + "y" * 5) == ["x" * 1000, "\n" + "y" * 5]
    assert split_document("") == [""]


# Mistakes


def test_missing_files_and_folders(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    missing = str(tmp_path / "no.txt")
    message = error_of(pack, missing, tokenizer, 4)
    assert message.startswith(f"no such file: '{missing}': check the path (")
    pattern = str(tmp_path / "*.txt")
    assert error_of(read_texts, [pattern]) == (
        f"no file matches '{pattern}': check the pattern, and quote it in a shell"
    )
    (tmp_path / "folder.txt").mkdir()
    assert error_of(read_texts, pattern).startswith("no file matches")
    assert error_of(read_texts, tmp_path) == (
        f"'{tmp_path}' is a folder: give a file, or a glob such as '{tmp_path}/**/*.txt'"
    )


def test_a_list_of_documents_is_told_how(tokenizer: PreTrainedTokenizerFast) -> None:
    message = error_of(pack, ["Once upon a time " * 1000], tokenizer, 4)
    assert "pass documents themselves as iter(documents)" in message
    assert len(message) < 250


def test_sources_are_checked_before_reading(folder: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        read_texts([folder / "a.txt", folder / "no.txt"])


@pytest.mark.parametrize("name", ["x.txt", "x.txt.gz", "x.jsonl"])
def test_not_utf8(tmp_path: Path, name: str) -> None:
    good = b'{"text": "fine"}\n'
    data = good + b'{"text": "caf\xe9"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    message = error_of(read_texts, tmp_path / name)
    assert message.startswith(
        f"{tmp_path / name}: not valid UTF-8 at byte {len(good) + 13} (0xe9): convert it"
    )


def test_unknown_compression_is_named_as_a_cause(tmp_path: Path) -> None:
    (tmp_path / "x.txt.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    message = error_of(read_texts, tmp_path / "x.txt.zst")
    assert "byte 1 (0xb5)" in message
    assert "must end in .gz, .xz or .bz2" in message


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".bz2"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_broken_archives(tmp_path: Path, suffix: str, damage: str) -> None:
    text = "".join(f"line {number}\n" for number in range(9999)).encode()
    compress: dict[str, Callable[[bytes], bytes]]
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".bz2": bz2.compress}
    whole = compress[suffix](text)
    middle = len(whole) // 2
    flipped = bytearray(whole)
    flipped[middle] ^= 255
    path = tmp_path / f"x.txt{suffix}"
    path.write_bytes({"cut": whole[:middle], "flipped": bytes(flipped), "other": b"plain text"}[damage])
    message = error_of(read_texts, path)
    assert message.startswith(f"{path}: not a whole {suffix} file (")
    assert message.endswith("fetch or compress it again")


def test_cut_jsonl_archive(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "fine"}\n')[:-9])
    assert error_of(read_texts, path).startswith(f"{path}: not a whole .gz file (")


def test_unreadable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"text"))

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setitem(data_module.OPENERS, ".gz", denied)
    assert (
        error_of(read_texts, tmp_path / "x.gz") == f"{tmp_path / 'x.gz'}: cannot be read: Permission denied"
    )


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{text: 1}", "not JSON (Expecting property name enclosed in double quotes): write"),
        ('{"text": "cut', "not JSON (Unterminated string"),
        ("[" * 100_000, "not JSON ("),
        ("[1]", "found list, not an object: write one object a line"),
        ('"text"', "found str, not an object: write one object a line"),
        ('{"a": 1, "b": 2}', "no field 'text', its fields are 'a', 'b': set the text field"),
        ("{}", "no field 'text', its fields are none: set the text field"),
    ],
)
def test_bad_jsonl_lines(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n{{"text": "fine"}}\n')
    assert error_of(read_texts, path).startswith(f"{path}, line 3: {problem}")


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("null", "found NoneType, not a string: leave it out or convert it"),
        ("[1]", "found list, not a string: leave it out or convert it"),
        (r'"ab\ud800"', "a lone surrogate at character 2: remove it"),
    ],
)
def test_bad_jsonl_values(tmp_path: Path, value: str, problem: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"text": {value}}}')
    assert error_of(read_texts, path) == f"{path}, line 1, field 'text': {problem}"


def test_too_few_tokens(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    path = tmp_path / "x.txt"
    path.write_text("")
    remedy = "give more text or a smaller length"
    assert error_of(pack, path, tokenizer, 4) == f"{path} has 0 tokens, and one row needs 4: {remedy}"
    path.write_text("abc")
    assert error_of(pack, [path], tokenizer, 4) == f"{path} has 3 tokens, and one row needs 4: {remedy}"
    assert error_of(pack, iter(["abc"]), tokenizer, 4).startswith("the data has 3 tokens")
    assert error_of(pack, [], tokenizer, 4).startswith("an empty list has 0 tokens")
    assert len(pack(iter(["abcd"]), tokenizer, 4)) == 1


def test_bad_lengths_and_limits(tokenizer: PreTrainedTokenizerFast) -> None:
    for length in (1, 0, -1):
        message = error_of(pack, "pydoc", tokenizer, length)
        assert message == f"length={length}: a row needs at least 2 tokens, since each predicts the next"
        with pytest.raises(DataError, match=f"length={length}"):
            PackedDataset(torch.arange(9).numpy(), length)
    message = error_of(pack, "pydoc", tokenizer, 8, limit_tokens=7)
    assert message == "limit_tokens=7 is less than one row of 8 tokens: raise it"


def test_bad_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    assert error_of(pack, 5, tokenizer, 4).startswith("int is not data: ")
    assert error_of(pack, iter(["ok", 5]), tokenizer, 4).startswith("document 1: found int, not a string")
    assert error_of(pack, iter(["ok", "\udc80"]), tokenizer, 4).startswith("document 1: a lone surrogate")
    for ids in ([[1, 2], [3, 4]], [0.5], ["a"], 3, None):
        message = error_of(pack, [{"input_ids": [1]}, {"input_ids": ids}], tokenizer, 4)
        assert message.startswith("row 1: input_ids has shape ")
        assert message.endswith("give one list of whole numbers a row")


def test_repeated_shuffle_visits_every_row_before_any_again() -> None:
    order = list(RepeatedShuffle(rows=5, total=13, seed=3))
    assert len(order) == len(RepeatedShuffle(5, 13, 3)) == 13
    first, second, third = order[:5], order[5:10], order[10:]
    assert sorted(first) == sorted(second) == list(range(5))
    assert first != second
    assert len(set(third)) == 3
    assert list(RepeatedShuffle(rows=5, total=7, seed=3)) == order[:7]
    assert list(RepeatedShuffle(rows=5, total=13, seed=4)) != order
