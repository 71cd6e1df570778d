"""Probes: exact statistics and tiles of an attention map that is never held whole."""

from multihead.probes.beside import Beside
from multihead.probes.catalogue import DEFAULT, PROBES, first_keys_mass, offset_mass, tokens_mass
from multihead.probes.probe import Probe

__all__ = [
    "DEFAULT",
    "PROBES",
    "Beside",
    "Probe",
    "first_keys_mass",
    "offset_mass",
    "tokens_mass",
]
