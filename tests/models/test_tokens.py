"""Tokens are named by the text that they stand for, whatever the tokenizer and the script."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multihead.models.tokens import CONTINUATION_MARK, name_predicted_token, name_tokens

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers, processors  # noqa: E402
from tokenizers.models import BPE, Unigram, WordPiece  # noqa: E402
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast  # noqa: E402
from transformers.convert_slow_tokenizer import bytes_to_unicode  # noqa: E402

SCRIPTS = (
    "the cat sat, on a mat.\n\t",
    "猫坐在垫子上。",
    "القطة جلست على",
    "החתול ישב",
    "แมวนั่งบนเสื่อ",
    "बिल्ली चटाई पर",
    "👩‍👩‍👧🇫🇷👍🏽é e\u0301▁Ġ",
)
TEXT = st.lists(
    st.sampled_from(SCRIPTS).flatmap(lambda script: st.text(script, min_size=1, max_size=6)), max_size=4
).map(" ".join)
BYTES = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}


def wrapped(tokenizer: Any, start: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer of `tokenizers` as one of transformers, which puts a start token before each text, if any."""
    if start is not None:
        tokenizer.post_processor = processors.Sequence(
            [
                *([tokenizer.post_processor] if tokenizer.post_processor else []),
                processors.TemplateProcessing(f"{start} $A", special_tokens=[(start, tokenizer.token_to_id(start))]),
            ]
        )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def learnt(pieces: list[str], text: str) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return a vocabulary of characters and merges: of the marked text, its first pairs of pieces."""
    vocabulary = {piece: place for place, piece in enumerate(dict.fromkeys(["<unk>", "<s>", "</s>", *BYTES, *pieces]))}
    merges = list(dict.fromkeys(pairwise(text)))[::2]
    for merge in merges:
        vocabulary.setdefault("".join(merge), len(vocabulary))
    return vocabulary, merges


def with_byte_fallback(text: str, known: str, *, prepends: bool, metaspace: bool = False) -> Any:
    """Return a tokenizer like that of Llama 2, or without the space before a text of Gemma."""
    marked = text.replace(" ", "▁")
    vocabulary, merges = learnt(["▁", *known], "".join(each for each in "▁" + marked if each in "▁" + known))
    model = Tokenizer(BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    if metaspace:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if prepends else "never", split=False)
    else:
        steps = [*([normalizers.Prepend("▁")] if prepends else []), normalizers.Replace(" ", "▁")]
        model.normalizer = normalizers.Sequence(steps)
    strips = [decoders.Strip(" ", 1, 0)] if prepends else []
    model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strips])
    return model


def byte_level(text: str, *, prepends: bool, trims: bool) -> Any:
    """Return a tokenizer like that of GPT-2, or RoBERTa's, which leaves spaces out of the offsets."""
    letters = bytes_to_unicode()
    marked = "".join(letters[byte] for byte in f" {text}".encode())
    model = Tokenizer(BPE(*learnt(list(letters.values()), marked)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prepends, use_regex=False)
    model.post_processor = processors.ByteLevel(trim_offsets=trims)
    model.decoder = decoders.ByteLevel()
    return model


def bytes_of(piece: str, *, byte_level: bool) -> bytes:
    """Return what an entry of the vocabulary stands for, by the convention of its tokenizer."""
    if byte_level:
        of = {letter: byte for byte, letter in bytes_to_unicode().items()}
        return bytes(of[letter] for letter in piece)
    return bytes([int(piece[3:5], 16)]) if piece in BYTES else piece.replace("▁", " ").encode()


def expected(text: str, meant: list[bytes]) -> list[str]:
    """Name each token by the characters whose first byte it has, given the bytes that its id stands for."""
    whole = b"".join(meant)
    extra = len(whole) - len(text.encode())
    assert whole[extra:].decode() == text
    assert not whole[:extra].strip()
    starts = [*accumulate((len(character.encode()) for character in text), initial=extra)]
    ends = [*accumulate(map(len, meant), initial=0)]
    names = []
    for (start, stop), size in zip(pairwise(ends), map(len, meant), strict=True):
        name = "".join(character for character, at in zip(text, starts, strict=False) if start <= at < stop)
        names.append(name if name or (size and stop <= extra) else CONTINUATION_MARK)
    return names


def encoded(tokenizer: Any, text: str) -> tuple[list[int], list[bool], list[tuple[int, int]]]:
    found = tokenizer(text, return_offsets_mapping=True, return_special_tokens_mask=True)
    return found["input_ids"], [bool(mark) for mark in found["special_tokens_mask"]], found["offset_mapping"]


@given(st.data(), TEXT.filter(str.strip))
def test_names_are_what_the_ids_stand_for_and_together_the_text(data: st.DataObject, text: str) -> None:
    prepends, is_byte_level = data.draw(st.booleans(), "prepends"), data.draw(st.booleans(), "byte level")
    if is_byte_level:
        model = byte_level(text, prepends=prepends, trims=data.draw(st.booleans(), "trims"))
    else:
        known = "".join(data.draw(st.sets(st.sampled_from(text.replace(" ", "") or "a")), "known"))
        text = text.replace("▁", "")
        metaspace = data.draw(st.booleans(), "metaspace")
        model = with_byte_fallback(text, known, prepends=prepends, metaspace=metaspace)
    tokenizer = wrapped(model, data.draw(st.sampled_from([None, "<s>"]), "start"))
    ids, special, offsets = encoded(tokenizer, text)
    named = name_tokens(tokenizer, ids, special, text=text, offsets=offsets)
    words = [piece for piece, mark in zip(tokenizer.convert_ids_to_tokens(ids), special, strict=True) if not mark]
    correct = expected(text, [bytes_of(piece, byte_level=is_byte_level) for piece in words])
    assert named.names == ["<s>"] * (len(ids) - len(words)) + correct
    assert named.gaps == [None if mark else "" for mark in special]
    if prepends and text.startswith(" ") and (is_byte_level or metaspace):
        return  # the ids are those of the text without the space
    decoded = name_tokens(tokenizer, ids, special)
    assert (decoded.names, decoded.gaps) == (named.names, named.gaps)


def named_both_ways(tokenizer: Any, text: str) -> tuple[list[tuple[str | None, str]], list[str]]:
    """Return the gaps and names of the tokens of a text, and the names of their ids alone."""
    ids, special, offsets = encoded(tokenizer, text)
    named = name_tokens(tokenizer, ids, special, text=text, offsets=offsets)
    return list(zip(named.gaps, named.names, strict=True)), name_tokens(tokenizer, ids, special).names


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("猫坐", ["", "猫", "坐"]),
        ("the cat", ["", "th", "e", " c", "a", "t"]),
        (" 猫", ["", " ", "猫"]),
        ("猫 é", ["", "猫", " ", "é", CONTINUATION_MARK]),
    ],
)
def test_a_space_that_was_prepended_has_no_text_and_takes_none_of_the_first_character(
    text: str, names: list[str]
) -> None:
    named, decoded = named_both_ways(wrapped(with_byte_fallback("cth", "猫坐theca", prepends=True)), text)
    assert named == [("", name) for name in names]
    assert decoded == names


def word_pieces() -> Any:
    """Return a tokenizer like that of BERT, which lower-cases a text and leaves its accents out."""
    words = ("<unk>", "[CLS]", "[SEP]", "hello", "cafe", "##s", "世", "界", ".")
    made = Tokenizer(WordPiece({word: place for place, word in enumerate(words)}, unk_token="<unk>"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", cls_token="[CLS]", sep_token="[SEP]")


def test_pieces_of_words_are_parts_of_the_text_as_it_was_written() -> None:
    named, decoded = named_both_ways(word_pieces(), "Hello Cafe\u0301s 世界 猫.")
    assert named[0] == (None, "[CLS]")
    assert named[1:-1] == [
        ("", "Hello"),
        (" ", "Cafe\u0301"),
        ("", "s"),
        (" ", "世"),
        ("", "界"),
        (" ", "猫"),
        ("", "."),
    ]
    assert decoded == ["[CLS]", "hello", "cafe", "s", "世", "界", "<unk>", ".", "[SEP]"]


def test_a_normalised_text_and_added_tokens_with_their_spaces_are_named_as_written() -> None:
    made = Tokenizer(
        Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁fi", -1.0), ("n", -2.0), ("1", -2.0), ("2", -2.0), ("⁄", -2.0)], 0)
    )
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True), AddedToken("<r>", rstrip=True)])
    named, _ = named_both_ways(tokenizer, "ﬁn ½ <mask> fi<r>  n")
    further = ("", CONTINUATION_MARK)
    half = [("", " "), ("", "½"), further, further]
    assert named == [("", "ﬁ"), ("", "n"), *half, ("", " <mask>"), ("", " fi"), ("", "<r>  "), ("", ""), ("", "n")]


def test_bytes_that_are_no_character_are_named_one_by_one() -> None:
    tokenizer = wrapped(with_byte_fallback("a", "a", prepends=False))
    ids = [tokenizer.convert_tokens_to_ids(piece) for piece in ("<0xE5>", "a", "<0xE5>", "<0xBD>")]
    assert name_tokens(tokenizer, ids, [False] * 4).names == ["<0xE5>", "a", "<0xE5>", "<0xBD>"]
    assert name_tokens(ByT5Tokenizer(), [0xE5 + 3, 0xBD + 3], [False] * 2).names == ["<0xE5>", "<0xBD>"]


@pytest.mark.parametrize("byte_tokens", [True, False])
def test_a_predicted_byte_is_named_by_its_value_and_a_word_with_its_space(*, byte_tokens: bool) -> None:
    text = "a 猫"
    model = (
        byte_level(text, prepends=False, trims=False) if byte_tokens else with_byte_fallback(text, "a", prepends=True)
    )
    tokenizer = wrapped(model)
    before = tokenizer("a")["input_ids"]
    for piece, name in (("å", "<0xE5>"), ("½", "<0xBD>"), ("Ġ", " "), ("a", "a")):
        entry = piece if byte_tokens else name if name.startswith("<") else piece.replace("Ġ", "▁")
        assert name_predicted_token(tokenizer, tokenizer.convert_tokens_to_ids(entry), before) == name
