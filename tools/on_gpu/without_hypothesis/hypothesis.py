"""Stand-in for hypothesis where it is not installed: the fuzzer imports strategies, and draws by its own means."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

strategies = MagicMock(name="strategies")
sys.modules["hypothesis.strategies"] = strategies
