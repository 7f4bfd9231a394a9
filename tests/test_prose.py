"""benchmarks/prose.py: prose stays, manuals go, and no character is changed."""

from __future__ import annotations

import pydoc_data.topics

import prose

NOVEL = (
    "She was silent for a while, and looked out upon the garden, where the rain had begun to fall again.\n"
    * 60
)


def test_pieces_are_the_text():
    text = NOVEL + "x" * 5_000 + "\nend without a newline"
    found = list(prose.pieces(text, 700))
    assert "".join(found) == text
    assert all(len(piece) >= 700 for piece in found[:-1])
    assert list(prose.pieces("")) == []


def test_prose_and_manuals(tmp_path, capsys):
    manual = "\n".join(pydoc_data.topics.topics.values())
    source, out = tmp_path / "mix.txt", tmp_path / "prose.txt"
    source.write_text(NOVEL + manual, encoding="utf-8")
    prose.main([str(source), str(out)])
    left = out.read_text(encoding="utf-8")
    assert left.startswith(NOVEL[:-2_000])
    assert len(left) < len(NOVEL) + 0.1 * len(manual)
    assert f"{len(left):,} of {len(NOVEL + manual):,} characters are prose" in capsys.readouterr().out
