"""Text from files or from Python's standard library, as characters (UTF-8 bytes), an alphabet of its own, or words."""

from __future__ import annotations

import lzma
import re
import sysconfig
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.workloads.data.text import LEAST, LENGTH, MaskedTokens, NextTokens
from mpisparse.runtime.workloads.records import Data

TEST_SHARE = 0.05  # of a single text, at its end
PYTHON_BYTES = 3_000_000
WORDS = 8191  # in the vocabulary, including the unknown word; a mask token comes on top
SUFFIXES = (".txt", ".xz")

# Marks of tokenized corpora such as <unk> and @-@ are one word; so are consecutive newlines.
_WORD = re.compile(r"<\w+>|@[^\w\s]@|\w+|[^\w\s]|\n+")


def load_text(path: Path, unit: str, masked: bool, length: int = LENGTH) -> Data:
    """Load a file, or all .txt and .xz files of a directory.

    If some are named train… and test…, only these are used, and those named validation…, valid… or val… for validation.
    """
    if length < LEAST:
        raise ConfigurationError(f"{path}: expected windows of at least {LEAST} {unit}, got {length}")
    if path.is_file():
        return _text_data(str(path), [_read(path)], unit, masked, length)
    paths = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not paths:
        raise ConfigurationError(f"{path}: expected a directory with {' or '.join(SUFFIXES)} files, found none")
    names = (("train",), ("test",), ("validation", "valid", "val"))
    parts = [[file for file in paths if file.name.split(".")[0] in known] for known in names]
    parts = [part for part in parts if part] if all(parts[:2]) else [paths]
    return _text_data(str(path), [b"\n".join(map(_read, part)) for part in parts], unit, masked, length)


def python_source(unit: str, masked: bool) -> Data:
    """Load the first 3 MB of the standard library's modules, in alphabetical order."""
    directory = Path(sysconfig.get_path("stdlib"))
    text = b""
    for path in sorted(directory.glob("[a-z]*.py")):
        text += path.read_bytes()
        if len(text) >= PYTHON_BYTES:
            break
    text = text[: text.rfind(b"\n", 0, PYTHON_BYTES) + 1]
    if len(text) < PYTHON_BYTES // 10:
        raise ConfigurationError(
            f"expected Python's standard library in {directory}, found only {len(text)} bytes of source;"
            " pass a text file as --data"
        )
    return _text_data(str(directory), [text], unit, masked, LENGTH)


def _read(path: Path) -> bytes:
    try:
        return lzma.decompress(path.read_bytes()) if path.suffix.lower() == ".xz" else path.read_bytes()
    except (OSError, lzma.LZMAError, EOFError) as error:
        raise ConfigurationError(f"{path}: could not be read as {path.suffix.lstrip('.') or 'text'}: {error}") from error


def _text_data(source: str, texts: Sequence[bytes], unit: str, masked: bool, length: int) -> Data:
    """Make data from a training, a test and optionally a validation text, or from one text whose end is for testing."""
    if unit == "words":
        parts, vocabulary = _number_words(_cut(source, unit, [_split_words(source, text) for text in texts], length))
    elif unit == "alphabet":
        parts, vocabulary = _number_letters(_cut(source, unit, [_split_letters(source, text) for text in texts], length))
    else:
        parts, vocabulary = _cut(source, unit, [np.frombuffer(text, np.uint8) for text in texts], length), 256
    vocabulary += masked
    windows = [MaskedTokens(part, length, vocabulary) if masked else NextTokens(part, length) for part in parts]
    task, sizes = "masked-tokens" if masked else "tokens", {"vocabulary": vocabulary, "length": length}
    return Data(windows[0], windows[1], task, sizes, windows[2] if len(windows) > 2 else None)


def _cut(source: str, unit: str, parts: Sequence[Any], length: int) -> Sequence[Any]:
    """Cut the test part off a single text; return several parts as they are. Check that none is too short."""
    if len(parts) == 1:
        cut = max(0, len(parts[0]) - max(length + 1, int(TEST_SHARE * len(parts[0]))))
        parts = [parts[0][:cut], parts[0][cut:]]
    if min(map(len, parts)) <= length:
        empty = "" if any(map(len, parts)) else " (the text is empty)"
        raise ConfigurationError(
            f"{source}: expected more than {length} {unit} each to train and to test on,"
            f" got {' and '.join(str(len(part)) for part in parts)}{empty}; give a longer text"
        )
    return parts


def _split_words(source: str, text: bytes) -> list[str]:
    return _WORD.findall(_decode(source, "words", text))


def _split_letters(source: str, text: bytes) -> NDArray[Any]:
    return np.frombuffer(_decode(source, "an alphabet", text).encode("utf-32-le"), np.uint32)


def _decode(source: str, what: str, text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise ConfigurationError(
            f"{source}: {what} need{'s' * what.startswith('an ')} text in UTF-8, but {error}; convert it, or add :characters"
        ) from error


def _number_letters(parts: Sequence[NDArray[Any]]) -> tuple[Sequence[NDArray[Any]], int]:
    """Number the letters that occur in the first part from 1; 0 is any other."""
    known = np.unique(parts[0])
    places = [np.minimum(np.searchsorted(known, part), len(known) - 1) for part in parts]
    coded = [np.where(known[at] == part, at + 1, 0).astype(np.int32) for at, part in zip(places, parts, strict=True)]
    return coded, len(known) + 1


def _number_words(parts: Sequence[Sequence[str]]) -> tuple[Sequence[NDArray[Any]], int]:
    """Number the most frequent words of the first part from 1, ties in alphabetical order; 0 is any other word."""
    ranked = sorted(Counter(parts[0]).items(), key=lambda entry: (-entry[1], entry[0]))
    numbers = {word: number for number, (word, _) in enumerate(ranked[: WORDS - 1], start=1)}
    coded = [np.fromiter((numbers.get(word, 0) for word in part), np.int32, len(part)) for part in parts]
    return coded, len(numbers) + 1
