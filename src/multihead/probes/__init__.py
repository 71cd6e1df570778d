"""Probes: exact statistics and tiles of an attention map that is never held whole."""

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
