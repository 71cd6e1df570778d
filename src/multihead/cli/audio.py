"""Read the samples of an audio file: PCM WAV with 8, 16, 24 or 32 bits per sample, or a .npy file."""

from __future__ import annotations

import wave
from typing import TYPE_CHECKING

import numpy as np

from multihead.errors import InputError
from multihead.files import check_file_name

if TYPE_CHECKING:
    from numpy.typing import NDArray

NPY_SAMPLE_RATE = 16_000
"""Samples per second assumed for a .npy file, which stores no rate; the rate of Hugging Face's speech models."""


def read_audio(file: str) -> tuple[NDArray[np.float32], int]:
    """Return the samples of an audio file, (samples,) from -1 to 1, and their rate in samples per second.

    The channels of a file are averaged.

    Raises:
        InputError: the file does not exist, or is neither a PCM WAV file nor a one-dimensional .npy array.
    """
    check_file_name(file)
    try:
        samples, rate = _read_array(file) if file.lower().endswith(".npy") else _read_wav(file)
    except FileNotFoundError:
        raise InputError(f"There is no file {file!r}.", "Check its name.") from None
    except (OSError, EOFError, ValueError, wave.Error) as error:
        raise InputError(
            f"{file!r} cannot be read as audio: {str(error).rstrip('.') or type(error).__name__}.",
            "Give a PCM WAV file, or an array of samples saved with numpy.save.",
        ) from None
    if not samples.size:
        raise InputError(f"{file!r} contains no audio.", "Give at least one sample.")
    return samples, rate


def _read_wav(file: str) -> tuple[NDArray[np.float32], int]:
    with wave.open(file, "rb") as opened:
        width, channels, rate = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
        if width > 4:
            raise ValueError(f"its samples have {8 * width} bits")
        content = opened.readframes(opened.getnframes())
    content = content[
        : len(content) // (width * channels) * width * channels
    ]  # the last sample of a truncated file may be incomplete
    if width == 3:  # 24 bits: copied to the high bytes of a 32-bit integer
        wide = np.zeros((len(content) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        whole = wide.view("<i4")[:, 0] / 2**31
    elif width == 1:  # the only unsigned format
        whole = np.frombuffer(content, np.uint8) / 128.0 - 1
    else:
        whole = np.frombuffer(content, f"<i{width}") / 2.0 ** (8 * width - 1)
    return whole.reshape(-1, channels).mean(1).astype(np.float32), rate


def _read_array(file: str) -> tuple[NDArray[np.float32], int]:
    found = np.load(file, allow_pickle=False)
    if not isinstance(found, np.ndarray) or found.ndim != 1 or found.dtype.kind != "f":
        raise ValueError("it is not an array of floating-point samples in one dimension")
    return found.astype(np.float32), NPY_SAMPLE_RATE
