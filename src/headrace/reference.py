"""This module turns a name in the configuration into a function: `module:function` or `path/to/file.py:function`.

Every error on the way becomes one `ConfigError` line that says which part of the name is wrong.
"""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from headrace.errors import ConfigError, HeadraceError, one_line


def import_function(reference: str) -> Callable[..., Any]:
    """Return the callable that the reference names.

    Modules are searched for as Python does, and last in the working directory. A file may import its neighbours.
    """
    where, name = split_reference(reference)
    module = _load_file(where) if where.endswith(".py") else _load_module(where)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{reference!r}: {where} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{reference!r}: {name} is a {type(found).__name__}, not a function")
    return found  # type: ignore[no-any-return]


def call_factory(what: str, factory: Callable[..., Any], /, *given: Any, **named: Any) -> Any:
    """Call a user's factory. An exception of the factory becomes one `ConfigError` line that begins with `what`.

    An error of Headrace's own is one line already and passes unchanged.
    """
    try:
        return factory(*given, **named)
    except HeadraceError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised {describe(error)}") from error


def split_reference(reference: str) -> tuple[str, str]:
    """Split a reference into the module or file, and the attribute in it."""
    where, separator, name = reference.rpartition(":")
    if not separator or not where or not name:
        raise ConfigError(f"{reference!r} must be `module:function` or `path/to/file.py:function`")
    return where, name


def find_source(where: str) -> Path | None:
    """Find the Python file of a module or path without running any code; None if a module has no Python file."""
    if where.endswith(".py"):
        return _file(where)
    _add_path(Path.cwd())
    top, *inner = where.split(".")
    spec = importlib.util.find_spec(top)
    for depth, _ in enumerate(inner, 2):
        folders = None if spec is None else spec.submodule_search_locations
        # find_spec with the full dotted name would import the parent packages.
        spec = PathFinder.find_spec(".".join(where.split(".")[:depth]), folders) if folders else None
    if spec is None:
        raise ConfigError(f"there is no module {where!r}")
    return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None


def _load_module(name: str) -> ModuleType:
    _add_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise ConfigError(f"there is no module {missing!r} (looked for {name!r})") from error
        raise ConfigError(f"importing {name} raised {describe(error)}") from error


def _load_file(name: str) -> ModuleType:
    path = _file(name)
    # The name comes from the resolved path: one file is one module, and it never shadows an installed module.
    module_name = f"headrace_file_{path.stem}_{hashlib.blake2b(str(path).encode(), digest_size=4).hexdigest()}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _add_path(path.parent)
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{name} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and forward references look up their module in sys.modules while the module is still executing.
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[module_name]
        raise ConfigError(f"importing {name} raised {describe(error)}") from error
    return module


def _file(name: str) -> Path:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"there is no file {name}")
    return path


def describe(error: BaseException) -> str:
    """Describe an exception of the user's code in one line: its type, its message, and the line that raised it."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {one_line(lines[0])}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    if frames and not frames[-1].filename.startswith("<frozen"):
        text += f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"
    return text


def _add_path(directory: Path) -> None:
    if str(directory) not in sys.path:
        sys.path.append(str(directory))
