"""What every engine keeps, on the GPU."""

from __future__ import annotations

import pytest
import torch
from test_engine import *  # noqa: F403

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
