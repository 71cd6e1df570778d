from multihead import compat, errors, export, kernels, kinds, masks, parallel, probes, scores
from multihead.counting.result import Census
from multihead.counting.run import census
from multihead.functional import attention, attention_weights, attention_with_logsumexp, explain, statistics
from multihead.interventions.ablate import ablate, scale_heads
from multihead.interventions.importance import Importance, importance
from multihead.interventions.means import HeadMeans, head_means
from multihead.interventions.measures import Measure, class_logit, logit_difference
from multihead.interventions.patch import Patching, patch
from multihead.interventions.together import OffTogether, off_together
from multihead.kernels.slow_paths import strict
from multihead.layer import MultiHeadAttention
from multihead.layer.cache import KeyValueCache
from multihead.layer.heads import merge_heads, split_heads
from multihead.layer.packing import pack, unpack
from multihead.layer.qk_norm import QKNorm
from multihead.models.use import use
from multihead.observation.observe import observe
from multihead.observation.places import places
from multihead.observation.record import Record
from multihead.observation.watch import Watch, qk_clip_factors
from multihead.rotary import Rotary
from multihead.viewer.looking import look

__all__ = [
    "Census",
    "HeadMeans",
    "Importance",
    "KeyValueCache",
    "Measure",
    "MultiHeadAttention",
    "OffTogether",
    "Patching",
    "QKNorm",
    "Record",
    "Rotary",
    "Watch",
    "ablate",
    "attention",
    "attention_weights",
    "attention_with_logsumexp",
    "census",
    "class_logit",
    "compat",
    "errors",
    "explain",
    "export",
    "head_means",
    "importance",
    "kernels",
    "kinds",
    "logit_difference",
    "look",
    "masks",
    "merge_heads",
    "observe",
    "off_together",
    "pack",
    "parallel",
    "patch",
    "places",
    "probes",
    "qk_clip_factors",
    "scale_heads",
    "scores",
    "split_heads",
    "statistics",
    "strict",
    "unpack",
    "use",
]
__version__: str
