"""The graph of imports, read from the source: no circles, and heavy libraries only where they belong.

Every import counts: at the top of a file, inside a function, and under `if TYPE_CHECKING`. What import-linter can say
is in `pyproject.toml`; here is the rest.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"

ASSEMBLIES = {
    "headrace": "its public names",
    "headrace.api": "a run from Python",
    "headrace.bench": "measures single parts",
    "headrace.cli": "the command line",
    "headrace.cluster.launchers.fork_server": "loads the libraries of workers ahead",
    "headrace.cluster.worker_main": "assembles the roles of a worker",
    "headrace.pipeline.inputs": "makes tasks, scorers and tokenizers",
    "headrace.pipeline.launch": "starts or resumes a run",
    "headrace.pipeline.replay": "assembles a trainer alone",
    "headrace.pipeline.run_session": "assembles a run",
    "headrace.pipeline.trial": "tries tasks, scorers and tokenizers",
    "headrace.pipeline.workers": "makes the worker processes of a run, and their handles",
    "headrace.sim": "assembles a run of fakes",
}
"""Modules and packages that may know concrete classes: they choose one and hand it to those who use it."""

GROUND = {"channel", "config", "errors", "observe", "reference", "run_dir", "types"}
"""What all may import, whatever the layers above it in `pyproject.toml` are."""

ARROWS = {
    "algorithms": set(),
    "buffer": set(),
    "cluster": set(),
    "delivery": set(),
    "engines": {
        "delivery.base",
        "delivery.digest",
        "delivery.receiver",
        "delivery.setup",
        "delivery.shared_base",
        "delivery.transports.tcp_wire",
        "models",
    },
    "gateway": {"engines.base", "engines.streams", "rollouts.base", "scoring.base", "tasks.base"},
    "headrace_vllm_plugin": {
        "delivery.base",
        "delivery.copying",
        "delivery.digest",
        "delivery.live",
        "delivery.parts",
        "delivery.plan",
        "delivery.transports",
    },
    "models": set(),
    "pipeline": {
        "algorithms.assemble",
        "algorithms.credit",
        "buffer",
        "cluster.base",
        "delivery.base",
        "engines.base",
        "engines.serving",
        "engines.streams",
        "engines.pool",
        "gateway.base",
        "rollouts",
        "scoring.base",
        "tasks.base",
        "tasks.mixture",
        "tasks.source",
        "training.base",
        "training.remote",
    },
    "review": {
        "buffer.reader",
        "delivery.digest",
        "models.loading",
        "models.lora",
        "tasks.chat",
        "training.checkpoints.base",
        "training.checkpoints.remote_store",
        "training.lora",
    },
    "rollouts": {"engines.base", "scoring.base", "tasks.base"},
    "scoring": {"delivery.base", "engines.base", "engines.serving", "engines.step_values"},
    "tasks": set(),
    "training": {
        "algorithms.losses",
        "delivery.base",
        "delivery.digest",
        "delivery.parts",
        "delivery.plan",
        "delivery.publisher",
        "delivery.setup",
        "delivery.shared_base",
        "delivery.transports.collectives",
        "delivery.transports.segments",
        "models",
    },
}  # fmt: skip
"""Package -> what its modules, except assemblies, may import of other packages above the ground.

A stage is known to the others by its `base.py`. Delivery and models are libraries of the engines and the trainer.
"""

TORCH = (
    "headrace.algorithms.losses", "headrace.bench", "headrace.delivery", "headrace.engines.embedded",
    "headrace.models", "headrace.review.recompute", "headrace.training", "headrace_vllm_plugin",
)  # fmt: skip
"""What may load torch when it is itself loaded. The controller, the command line and the launchers load none of it."""


class Import(NamedTuple):
    """One module imports another one, of ours or not."""

    importer: str
    imported: str
    at_load: bool
    """Whether it happens as soon as the importer is loaded: neither in a function nor for type checkers only."""

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


@cache
def files(root: Path = SOURCE) -> Mapping[str, Path]:
    """Module -> its file. A package's own module is its `__init__.py`."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(root: Path = SOURCE) -> list[Import]:
    """All imports of all modules below `root`."""
    modules = files(root)
    found = []
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for names, at_load in imported_names(ast.parse(path.read_text()), package):
            # `from a import b` imports the module a.b if there is one, else the module a.
            imported = next((name for name in names if name in modules), names[-1])
            if imported != module:
                found.append(Import(module, imported, at_load))
    return found


def imported_names(tree: ast.Module, package: str) -> Iterator[tuple[list[str], bool]]:
    """For each imported name the modules that it may mean, most precise first; and whether it is imported at load."""
    late = {
        id(node)
        for parent in ast.walk(tree)
        if isinstance(parent, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or is_type_checking(parent)
        for node in ast.walk(parent)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield [alias.name], id(node) not in late
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                around = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*around, base] if base else around)
            for alias in node.names:
                yield [f"{base}.{alias.name}", base], id(node) not in late


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def circles(edges: Iterable[tuple[str, str]]) -> list[str]:
    """One circle of the graph, drawn, if it has any."""
    graph: dict[str, set[str]] = {}
    for importer, imported in edges:
        graph.setdefault(importer, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [" -> ".join(reversed(error.args[1]))]
    return []


def entry_circles(found: Iterable[Import], modules: Mapping[str, Path]) -> list[str]:
    """For each folder a circle of its files and subfolders, a subfolder taken as one, if there is any.

    A circle of files is one in the folder that holds them all.
    """
    packages = sorted(module for module, path in modules.items() if path.name == "__init__.py")
    between: dict[str, set[tuple[str, str]]] = {package: set() for package in ["", *packages]}
    for each in found:
        if each.imported not in modules:
            continue
        for package in between:
            pair = entry_of(package, each.importer), entry_of(package, each.imported)
            if None not in pair and pair[0] != pair[1]:
                between[package].add(pair)  # type: ignore[arg-type]
    return [f"in {package or 'src'}: {circle}" for package, pairs in between.items() for circle in circles(pairs)]


def entry_of(package: str, module: str) -> str | None:
    """The file or subfolder of a package that a module is or belongs to.

    The folder above all, "", has the packages of `headrace` as entries: the plugin lies between two of them.
    """
    if not package:
        parts = module.split(".")
        return ".".join(parts[:2]) if parts[0] == "headrace" else parts[0]
    if package == "headrace":
        return None
    if module == package:
        return "__init__"
    return module.removeprefix(package + ".").split(".")[0] if module.startswith(package + ".") else None


def loaders(found: Iterable[Import], library: str) -> dict[str, str]:
    """Module -> through which import it loads the library as soon as it is itself loaded."""
    importers: dict[str, set[str]] = {}
    loads: dict[str, str] = {}
    for each in found:
        # To load a.b.c is to load a.b and a, too.
        for module in (each.importer, each.imported):
            while package := module.rpartition(".")[0]:
                importers.setdefault(package, set()).add(module)
                module = package
        if each.at_load:
            importers.setdefault(each.imported, set()).add(each.importer)
            if each.imported.split(".")[0] == library:
                loads[each.importer] = library
    new = list(loads)
    while new:
        module = new.pop()
        for importer in sorted(importers.get(module, ())):
            if importer not in loads:
                loads[importer] = module
                new.append(importer)
    return loads


def importers_of(library: str) -> list[str]:
    return sorted({each.importer for each in imports() if each.imported.split(".")[0] == library})


def inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_files_and_folders_form_no_circle() -> None:
    assert entry_circles(imports(), files()) == []


def test_triton_is_imported_only_in_kernels() -> None:
    found = importers_of("triton")
    assert found
    assert [module for module in found if "kernels" not in module.split(".")] == []


def test_triton_is_loaded_only_by_what_runs_on_a_gpu() -> None:
    """Triton is no dependency of Headrace: everything else must load where it is not installed."""
    only = ("headrace.delivery.kernels", "headrace.engines.embedded.kernels", "headrace.engines.embedded.device")
    assert [module for module in loaders(imports(), "triton") if not inside(module, *only)] == []


def test_vllm_is_imported_only_beside_vllm() -> None:
    """vLLM has an environment of its own, in which the plugin runs; the driver speaks to it over HTTP."""
    found = importers_of("vllm")
    assert found
    assert [module for module in found if not inside(module, "headrace.engines.vllm", "headrace_vllm_plugin")] == []
    assert [module for module in loaders(imports(), "vllm") if inside(module, "headrace")] == []


def test_ray_is_imported_only_by_the_driver_of_its_launcher() -> None:
    """Ray is no dependency of Headrace: everything else must load where it is not installed."""
    assert importers_of("ray") == ["headrace.cluster.launchers.ray_driver"]
    assert list(loaders(imports(), "ray")) == ["headrace.cluster.launchers.ray_driver"]


def test_torch_is_loaded_only_where_weights_are() -> None:
    """Everything else loads without torch: the controller has none, and `headrace --help` answers at once."""
    loads = {**loaders(imports(), "torch"), **loaders(imports(), "transformers")}
    assert [f"{module} (by {why})" for module, why in loads.items() if not inside(module, *TORCH)] == []


def test_only_assemblies_know_concrete_classes() -> None:
    """Every other import between packages is one of the arrows, and every arrow is used."""
    unused = {(package, shown) for package, allowed in ARROWS.items() for shown in allowed}
    wrong = []
    for each in crossing_imports():
        package, imported = package_of(each.importer), each.imported.removeprefix("headrace.")
        arrows = {shown for shown in ARROWS[package] if inside(imported, shown)}
        unused -= {(package, shown) for shown in arrows}
        if not arrows:
            wrong.append(str(each))
    assert sorted(set(wrong)) == []
    assert sorted(unused) == []


def test_every_assembly_is_there_and_needed() -> None:
    """An assembly is needed if a module of it imports what is no arrow of its package."""
    assert [name for name in ASSEMBLIES if name not in files()] == []
    needed = set()
    for each in crossing_imports(of_assemblies=True):
        allowed = ARROWS.get(package_of(each.importer), set())
        if not inside(each.imported.removeprefix("headrace."), *allowed):
            needed |= {name for name in ASSEMBLIES if in_assembly(each.importer, name)}
    assert sorted(set(ASSEMBLIES) - needed) == []


def crossing_imports(*, of_assemblies: bool = False) -> Iterator[Import]:
    """Imports from one package to another one above the ground: those of assemblies, or those of all others.

    What vLLM's driver imports of its plugin is left out.
    """
    for each in imports():
        importer, imported = package_of(each.importer), package_of(each.imported)
        above = each.imported in files() and imported not in GROUND | {importer}
        plugin = inside(each.importer, "headrace.engines.vllm") and imported == "headrace_vllm_plugin"
        chosen = any(in_assembly(each.importer, name) for name in ASSEMBLIES) == of_assemblies
        if above and chosen and importer not in GROUND | {"__main__"} and not plugin:
            yield each


def in_assembly(module: str, assembly: str) -> bool:
    """Whether a module is an assembly or inside it; `headrace` is one without what is inside it."""
    return module == assembly if assembly == "headrace" else inside(module, assembly)


def package_of(module: str) -> str:
    """`engines` of `headrace.engines.embedded.core`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "headrace" and len(parts) > 1 else parts[0]


def write(root: Path, sources: dict[str, str]) -> None:
    for name, source in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        for folder in path.relative_to(root).parents:
            if folder != Path():
                (root / folder / "__init__.py").touch()


@pytest.mark.parametrize(
    ("sources", "circle"),
    [
        ({"p/a.py": "import p.b", "p/b.py": "from p.a import x"}, "in p: "),
        ({"p/a.py": "def f():\n    from p import b", "p/b.py": "import p.a"}, "in p: "),
        ({"p/a.py": "if TYPE_CHECKING:\n    from p.b import B", "p/b.py": "from . import a"}, "in p: "),
        ({"p/a.py": "from p.s.b import b", "p/s/b.py": "", "p/s/c.py": "from ..a import a"}, "in p: "),
        ({"headrace/s/a.py": "import headrace.t.a", "headrace/t/b.py": "import headrace.s.b", "headrace/t/a.py": "",
          "headrace/s/b.py": ""}, "in src: "),
    ],
)  # fmt: skip
def test_a_circle_is_found(tmp_path: Path, sources: dict[str, str], circle: str) -> None:
    write(tmp_path, sources)
    (found,) = entry_circles(imports(tmp_path), files(tmp_path))
    assert found.startswith(circle)


def test_layers_are_no_circle(tmp_path: Path) -> None:
    write(tmp_path, {"p/a.py": "from p.s.b import b", "p/s/b.py": "from p import c", "p/c.py": "import torch"})
    assert entry_circles(imports(tmp_path), files(tmp_path)) == []


def test_what_is_imported_late_is_not_loaded(tmp_path: Path) -> None:
    sources = {
        "p/a.py": "from p.s.b import b",
        "p/s/b.py": "",
        "p/s/__init__.py": "import torch.nn",
        "p/late.py": "def f():\n    import torch\n    from p import a",
        "p/typed.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\nclass C:\n    import os",
    }
    write(tmp_path, sources)
    assert loaders(imports(tmp_path), "torch") == {"p.s": "torch", "p.s.b": "p.s", "p.a": "p.s.b"}
