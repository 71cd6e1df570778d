"""Position biases, which are added to the scores. The package also implements the softcap and the sinks."""

from multihead.scores.bias import RelativeBias, offsets
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias

__all__ = ["ALiBi", "LearnedBias", "RelativeBias", "T5Bias", "offsets"]
