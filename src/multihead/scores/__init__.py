"""Position biases added to the scores. The package also holds the softcap and the sinks."""

from multihead.scores.bias import RelativeBias
from multihead.scores.position_biases import ALiBi, LearnedBias, T5Bias

__all__ = ["ALiBi", "LearnedBias", "RelativeBias", "T5Bias"]
