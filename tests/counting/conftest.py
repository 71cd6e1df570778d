"""A tiny model that is saved once, and a census of a small corpus that is counted once."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

import multihead as mh
from tests.counting.tiny import jsonl, random_texts, saved_bert


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny BERT with its tokenizer."""
    return saved_bert(tmp_path_factory.mktemp("census") / "tiny-bert")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of 60 texts."""
    return jsonl(tmp_path_factory.mktemp("census") / "texts.jsonl", random_texts(60))


@pytest.fixture(scope="session")
def damaged(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A compressed file of the corpus whose end is missing."""
    file: Path = tmp_path_factory.mktemp("census") / "texts.txt.gz"
    file.write_bytes(gzip.compress(Path(corpus).read_bytes())[:-20])
    return str(file)


@pytest.fixture(scope="session")
def folder(model: str, corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a census of the corpus in several shards."""
    out = tmp_path_factory.mktemp("census") / "out"
    mh.census(model, corpus, out=out, shard_bytes=1000, threads=1)
    return out


@pytest.fixture(scope="session")
def counted(folder: Path) -> mh.Census:
    """That census."""
    return mh.Census.load(folder)
