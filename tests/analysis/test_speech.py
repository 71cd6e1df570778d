"""The findings are equally whole in every language."""

from __future__ import annotations

from string import Formatter

from multihead.analysis.speech import SPEECH


def holes(sentence: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(sentence) if name}


def test_every_language_says_the_same_things_with_the_same_numbers() -> None:
    english = SPEECH["en"]
    for words in SPEECH.values():
        assert words.keys() == english.keys()
        for topic, sentence in words.items():
            assert holes(sentence) == holes(english[topic]), topic
            assert sentence.count("|") == english[topic].count("|"), topic


def test_a_weak_topic_says_most() -> None:
    weak = {topic: words for topic, words in SPEECH["en"].items() if topic.endswith(" weak")}
    assert len(weak) == 8
    assert all("most" in words.split("|")[0] for words in weak.values())
