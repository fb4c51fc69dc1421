"""Policy losses. A module here is one: its name is the one in `[algorithm] loss`, and its `build` makes the loss.

Beside `build` a module declares what others must know about the loss, in literals that are read without importing the
module, because it needs torch: `headrace.config.declared.LossFacts` says which. A user's own file is read the same way.
"""

import importlib
import pkgutil

from headrace.algorithms.losses.base import LOSSES

for _module in pkgutil.iter_modules(__path__):
    LOSSES[_module.name] = importlib.import_module(f"{__name__}.{_module.name}").build
