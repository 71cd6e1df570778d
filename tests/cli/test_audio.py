"""Audio files for speech models: the samples that they hold, and what is no audio."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from multihead.cli.audio import read_audio
from multihead.errors import InputError

SAMPLES = np.array([[0.0, 0.0], [0.5, 0.25], [-1.0, -1.0], [0.25, -0.25]])  # (samples, channels)


def wav(path: Path, width: int, channels: int = 1) -> str:
    whole = np.round(SAMPLES[:, :channels] * 2.0 ** (8 * width - 1)).astype(np.int64) + (128 if width == 1 else 0)
    content = b"".join(int(each).to_bytes(width, "little", signed=width > 1) for each in whole.flatten())
    with wave.open(str(path / "a.wav"), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(8000)
        file.writeframes(content)
    return str(path / "a.wav")


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_every_width_are_read(tmp_path: Path, width: int) -> None:
    samples, rate = read_audio(wav(tmp_path, width))
    assert (samples.dtype, rate) == (np.float32, 8000)
    np.testing.assert_allclose(samples, SAMPLES[:, 0], atol=1e-7)


def test_channels_are_averaged(tmp_path: Path) -> None:
    np.testing.assert_allclose(read_audio(wav(tmp_path, 2, channels=2))[0], SAMPLES.mean(1), atol=1e-7)


def test_an_array_is_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", SAMPLES[:, 0])
    samples, rate = read_audio(str(tmp_path / "a.npy"))
    np.testing.assert_allclose(samples, SAMPLES[:, 0])
    assert rate == 16_000


def test_what_is_no_audio_is_rejected(tmp_path: Path) -> None:
    np.save(tmp_path / "two.npy", SAMPLES)
    np.save(tmp_path / "none.npy", SAMPLES[:0, 0])
    (tmp_path / "text.wav").write_text("no audio")
    give = "Give a PCM WAV file, or an array of samples saved with numpy.save."
    for name, sentence in {
        "no.wav": "There is no file FILE. Check its name.",
        "text.wav": f"FILE cannot be read as audio: file does not start with RIFF id. {give}",
        "two.npy": (
            f"FILE cannot be read as audio: it is not an array of floating-point samples in one dimension. {give}"
        ),
        "none.npy": "FILE contains no audio. Give at least one sample.",
    }.items():
        with pytest.raises(InputError) as refused:
            read_audio(str(tmp_path / name))
        assert str(refused.value).replace(repr(str(tmp_path / name)), "FILE") == sentence
