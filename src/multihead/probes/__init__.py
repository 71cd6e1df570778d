"""Probes: exact statistics of attention heads, computed without storing the attention map."""

from multihead.probes.catalogue import DEFAULT, PROBES, first_keys_mass, offset_mass, tokens_mass
from multihead.probes.context import ProbeContext
from multihead.probes.probe import Probe, Statistic

__all__ = [
    "DEFAULT",
    "PROBES",
    "Probe",
    "ProbeContext",
    "Statistic",
    "first_keys_mass",
    "offset_mass",
    "tokens_mass",
]
