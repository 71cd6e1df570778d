"""What is done to scores before the softmax, and what takes part in it beside the keys."""

from multihead.scores.alibi import Alibi
from multihead.scores.learned import LearnedBias
from multihead.scores.relative import Relative
from multihead.scores.t5 import T5Bias

__all__ = ["Alibi", "LearnedBias", "Relative", "T5Bias"]
