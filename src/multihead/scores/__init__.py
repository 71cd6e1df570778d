"""Position biases added to the scores. The package also holds the softcap and the sinks."""

from multihead.scores.alibi import ALiBi
from multihead.scores.learned import LearnedBias
from multihead.scores.relative import RelativeBias
from multihead.scores.t5 import T5Bias

__all__ = ["ALiBi", "LearnedBias", "RelativeBias", "T5Bias"]
