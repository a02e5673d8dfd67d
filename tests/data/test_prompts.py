"""Prompt files of every kind that people have, and of some that they should not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from digenrl.data.prompts import load_prompts
from digenrl.errors import ConfigError

File = Callable[..., Path]


@pytest.fixture
def file(tmp_path: Path) -> File:
    def written(content: str | bytes, name: str = "prompts.txt") -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return written


def texts(path: Path) -> list[str]:
    return [prompt.text for prompt in load_prompts(path).prompts]


def refused(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_prompts(path)
    assert caught.value.fix
    return caught.value


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a cat\na dog\n", ["a cat", "a dog"]),
        ("a cat\na dog", ["a cat", "a dog"]),
        ("a cat", ["a cat"]),
        (b"\xef\xbb\xbfa cat\n", ["a cat"]),
        ("a cat\r\na dog\r\n", ["a cat", "a dog"]),
        ("a cat\r\na dog", ["a cat", "a dog"]),
        ("a 🎨 and 👩‍🚀\n", ["a 🎨 and 👩‍🚀"]),
        ("李明的猫\n二匹の猫\n고양이\n", ["李明的猫", "二匹の猫", "고양이"]),
        ("قطة حمراء\n\u202bעברית\u202c\n", ["قطة حمراء", "\u202bעברית\u202c"]),
        ("a\u2028b\na\u2029b\na\x85b\na\x0bb\na\x0cb\n", ["a\u2028b", "a\u2029b", "a\x85b", "a\x0bb", "a\x0cb"]),
        ("a\rb\n", ["a\rb"]),
        ("x" * 10_000 + "\n", ["x" * 10_000]),
        ("same\nsame\nother\nsame\n", ["same", "same", "other", "same"]),
        ("  leading and trailing  \n", ["  leading and trailing  "]),
        ('a sign that says "#1 @ home"\n', ['a sign that says "#1 @ home"']),
        ("Zoe\u0308\nZo\u00eb\n", ["Zoe\u0308", "Zo\u00eb"]),
    ],
)
def test_a_text_file_is_its_lines_as_they_are(file: File, content: str | bytes, expected: list[str]) -> None:
    assert texts(file(content)) == expected


@pytest.mark.parametrize(
    ("content", "blank"),
    [
        ("a\nb\n", 0),
        ("a\nb", 0),
        ("\na\nb\n", 1),
        ("a\n\nb\n", 1),
        ("a\nb\n\n", 1),
        ("a\n   \nb\n\t\n", 2),
        ("a\r\n\r\nb\r\n\r\n", 2),
        ("\n\n\na\n\n\nb\n\n\n", 7),
        ("a\nb\n  ", 1),
        ("\ufeff\na\nb\n", 1),
        ("a\n\u3000\u2028\nb\n", 1),
    ],
)
def test_blank_lines_are_skipped_and_counted(file: File, content: str, blank: int) -> None:
    loaded = load_prompts(file(content))
    assert [prompt.text for prompt in loaded.prompts] == ["a", "b"]
    assert loaded.blank_lines == blank


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
@pytest.mark.parametrize("content", ["", "\n", "\n \n\r\n", "\ufeff", "\ufeff\n"])
def test_a_file_without_prompts_is_refused_by_name(file: File, name: str, content: str) -> None:
    path = file(content, name)
    assert refused(path).what == f"{str(path)!r} holds no prompts."


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_bad_byte_is_named_with_its_line(file: File, mark: bytes) -> None:
    path = file(mark + b"first\nzweite\n" + b"gro\xdf\nlast\n")
    assert refused(path).what == f"{path}:3: byte 0xdf is not UTF-8."


def test_text_in_utf_16_is_a_bad_byte_in_line_one(file: File) -> None:
    path = file("a cat\n".encode("utf-16"))
    assert refused(path).what.startswith(f"{path}:1: byte 0x")


def test_files_are_read_as_utf_8_whatever_the_locale(file: File, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locale.getpreferredencoding", lambda *_: "ascii")
    monkeypatch.setattr("locale.getencoding", lambda: "ascii")
    assert texts(file("李明\n")) == ["李明"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.txt", "a\n\nb\0c\n"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": "b\\u0000c"}\n'),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": "b", "negative_prompt": "\\u0000"}\n'),
        ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": "b\\ud83d"}\n'),
    ],
)
def test_a_character_that_is_none_is_refused_with_its_line(file: File, name: str, content: str) -> None:
    path = file(content, name)
    assert refused(path).what.startswith(f"{path}:3: the prompt holds ")


@pytest.mark.parametrize("name", ["prompts.csv", "prompts", "prompts.json", "prompts.txt.gz"])
def test_a_file_of_another_kind_is_refused(file: File, name: str) -> None:
    assert "is not a prompt file" in refused(file("a\n", name)).what


def test_the_case_of_the_extension_does_not_matter(file: File) -> None:
    assert texts(file('{"prompt": "a"}', "P.JSONL")) == ["a"]
    assert texts(file("a", "P.TXT")) == ["a"]


@pytest.mark.parametrize("path", ["missing.txt", "a\0b.txt", "x" * 5000 + ".txt"])
def test_a_file_that_cannot_be_read_is_named(path: str) -> None:
    assert "Cannot read " in refused(Path(path)).what


def test_a_folder_is_no_prompt_file(tmp_path: Path) -> None:
    (tmp_path / "p.txt").mkdir()
    assert "Cannot read " in refused(tmp_path / "p.txt").what


def test_other_fields_of_a_jsonl_line_are_kept_for_the_rewards(file: File) -> None:
    rows = [
        {"prompt": "a cat", "negative_prompt": "dog", "image": "a.png", "objects": [{"shape": "circle"}], "weight": 0.5},
        {"prompt": "二匹 \u2028 猫", "id": None},
    ]
    path = file("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "p.jsonl")
    first, second = load_prompts(path).prompts
    assert (first.text, first.negative) == ("a cat", "dog")
    assert first.metadata == {"image": "a.png", "objects": [{"shape": "circle"}], "weight": 0.5}
    assert (second.text, second.negative, second.metadata) == ("二匹 \u2028 猫", "", {"id": None})


def test_geneval_metadata_is_read_as_it_is_published(file: File) -> None:
    line = (
        '{"tag": "counting", "include": [{"class": "clock", "count": 2}], '
        '"exclude": [{"class": "clock", "count": 3}], "prompt": "a photo of two clocks"}'
    )
    (prompt,) = load_prompts(file(line, "evaluation_metadata.jsonl")).prompts
    assert prompt.text == "a photo of two clocks"
    assert prompt.metadata == {
        "tag": "counting",
        "include": [{"class": "clock", "count": 2}],
        "exclude": [{"class": "clock", "count": 3}],
    }


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("{", "is not JSON"),
        ("a cat", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"prompt": "a"} {"prompt": "b"}', "is not JSON"),
        ('{"prompt": "a", "score": NaN}', "NaN is no JSON number"),
        ("[1]", "has no `prompt` text"),
        ('"a cat"', "has no `prompt` text"),
        ("null", "has no `prompt` text"),
        ('{"text": "a"}', "has no `prompt` text"),
        ('{"prompt": 3}', "has no `prompt` text"),
        ('{"prompt": null}', "has no `prompt` text"),
        ('{"prompt": "a", "negative_prompt": 3}', "`negative_prompt` is not a text"),
        ('{"prompt": "a", "negative_prompt": null}', "`negative_prompt` is not a text"),
    ],
)
def test_a_bad_line_of_a_jsonl_file_is_named(file: File, bad: str, says: str) -> None:
    path = file('{"prompt": "good"}\r\n\r\n' + bad + '\n{"prompt": "good"}\n', "p.jsonl")
    what = refused(path).what
    assert what.startswith(f"{path}:3: ")
    assert says in what


def test_the_shipped_prompts_load_and_the_held_out_ones_are_others() -> None:
    from digenrl.config.builtin import resolve

    train, held_out = (load_prompts(resolve(f"builtin:shapes/{n}.jsonl", where="x")) for n in ("train", "heldout"))
    assert len(held_out.prompts) >= 400
    assert train.blank_lines == held_out.blank_lines == 0
    assert not {p.text for p in train.prompts} & {p.text for p in held_out.prompts}


line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r"), min_size=1, max_size=12).filter(str.strip)


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lines=st.lists(line, min_size=1, max_size=6), end=st.sampled_from(["\n", "\r\n"]), bom=st.booleans())
def test_any_unicode_text_comes_back_unchanged(tmp_path: Path, lines: list[str], end: str, bom: bool) -> None:
    mark = b"\xef\xbb\xbf" if bom or lines[0].startswith("\ufeff") else b""
    path = tmp_path / "prompts.txt"
    path.write_bytes(mark + end.join(lines).encode())
    assert texts(path) == lines
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(mark + end.join(json.dumps({"prompt": text}, ensure_ascii=False) for text in lines).encode())
    assert texts(path) == lines
