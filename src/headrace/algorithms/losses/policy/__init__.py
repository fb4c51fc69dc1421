"""Policy losses. A module here is one: its name is the one in `[algorithm] loss`, and its `build` makes the loss.

The configuration takes its names from the files here, without importing them: they need torch.
"""

import importlib
import pkgutil

from headrace.algorithms.losses.base import LOSSES

for _module in pkgutil.iter_modules(__path__):
    LOSSES[_module.name] = importlib.import_module(f"{__name__}.{_module.name}").build
