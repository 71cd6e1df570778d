"""The tests of `make gpu-code`, which has Triton and its interpreter; `make test` has neither."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("MULTIHEAD_GPU_CODE") else ["*.py"]
