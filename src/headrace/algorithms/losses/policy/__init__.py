"""Policy losses. Each module here is one loss: its name is the value of `[algorithm] loss`, and its `build` makes it.

Beside `build`, a module declares what other code must know about the loss, as literals.
`headrace.config.declared.LossFacts` lists them. They are read without importing the module, because the module needs
torch. A user's own file is read in the same way.
"""

import importlib
import pkgutil

from headrace.algorithms.losses.base import LOSSES

for _module in pkgutil.iter_modules(__path__):
    LOSSES[_module.name] = importlib.import_module(f"{__name__}.{_module.name}").build
