"""A lower layer never imports a higher one, and heavy libraries stay where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = (  # lowest first; modules of one layer may import each other
    {"t2lens.hooks", "t2lens.checks", "t2lens.files"},
    {"t2lens.config", "t2lens.ordered_attention", "t2lens.sublayers", "t2lens.residual", "t2lens.text"},
    {"t2lens.mixing"},
    {"t2lens.block", "t2lens.lens_surface", "t2lens.model"},
    {"t2lens.readout"},
    {
        "t2lens.checkpoints",
        "t2lens.tracing",
        "t2lens.trace_variables",
        "t2lens.verification",
        "t2lens.edits",
        "t2lens.two_axis",
    },
    {"t2lens.zoo"},
    {"t2lens.analysis"},
    {"t2lens.store"},
    {"t2lens.viz"},
    {"t2lens.bench"},
    {"t2lens.apps", "t2lens.cli"},
)
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer}

# Upward all the same, and where in the source: "function" bodies, or imports made for "types" only.
EXCEPTIONS = {
    ("t2lens.tracing", "t2lens.viz"): "function",  # a Trace shows itself in notebooks
    ("t2lens.analysis", "t2lens.viz"): "function",  # and so does a Finding
    (
        "t2lens.mixing",
        "t2lens.model",
    ): "types",  # the model keeps the record; the accountant is called with the model
}

# library: the only parts that may import it
ONLY_IN = {
    "streamlit": {"t2lens.apps"},
    "plotly": {"t2lens.viz"},
    "transformer_lens": {"t2lens.hooks"},
}
NOT_IN = {"torch": {"t2lens.viz", "t2lens.apps"}}  # pictures are drawn from numpy; maths of a page is an analysis
NEVER = {"tests", "notebooks", "hooks", "apps"}


def module_files() -> dict[str, Path]:
    """Dotted module name: file, for the whole package (hooks/ and apps/ as they are imported)."""
    modules = {}
    for folder, package in (("t2lens", "t2lens"), ("hooks", "t2lens.hooks"), ("apps", "t2lens.apps")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join((package, *parts)).removesuffix(".__init__")] = path
    return modules


def part_of(module: str) -> str:
    """The unit that has a layer: `t2lens.residual.base` belongs to `t2lens.residual`."""
    return ".".join(module.split(".")[:2])


def imports(source: str, module: str, is_package: bool) -> list[tuple[str, str]]:
    """(absolute name, place) of every import; `from t2lens import x` gives `t2lens.x`."""
    found = []

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, place) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".") if is_package else module.split(".")[:-1]
                above = package[: len(package) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            found.extend((f"{base}.{alias.name}", place) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"}:
                found.append((str(node.args[0].value), place))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            place = "function"
        for child in ast.iter_child_nodes(node):
            typed = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and child in node.body
            visit(child, "types" if typed else place)

    visit(ast.parse(source), "module")
    return found


def violations(module: str, source: str, is_package: bool = False) -> list[str]:
    """What `source`, as the module named, may not import. `t2lens` re-exports lazily: it has no layer."""
    found = []
    here = part_of(module)
    for name, place in imports(source, module, is_package):
        root, target = name.split(".")[0], part_of(name)
        if root in NEVER or (root in ONLY_IN and here not in ONLY_IN[root]) or here in NOT_IN.get(root, ()):
            found.append(f"{module} imports {root}")
        if root != "t2lens" or here == "t2lens":
            continue
        if here == target == "t2lens.apps" and place != "types" and _up(module, name):
            found.append(f"{module} imports {name}")
        # `from t2lens import load` goes through the public face, which stands as high as apps and cli.
        level = LEVEL.get(target, len(LAYERS) - 1)
        if level > LEVEL[here] and EXCEPTIONS.get((here, target)) != place:
            found.append(f"{module} imports {name}")
    return found


def _up(module: str, name: str) -> bool:
    """Whether one part of the dashboard imports a page, or a component the frame around it."""
    inside, wanted = (each.removeprefix("t2lens.apps.").split(".")[0] for each in (module, name))
    if wanted == "views":
        return inside not in ("dashboard", "launch") and module != "t2lens.apps.views"
    return inside == "components" and wanted == "frame"


def test_every_module_has_a_layer():
    assert sorted({part_of(module) for module in module_files()} - {"t2lens"} - set(LEVEL)) == []


def test_no_module_imports_a_higher_layer_or_a_library_of_another_part():
    found = []
    for module, path in sorted(module_files().items()):
        found += violations(module, path.read_text(), path.name == "__init__.py")
    assert found == []


def test_every_exception_is_still_needed():
    used = set()
    for module, path in module_files().items():
        for name, place in imports(path.read_text(), module, path.name == "__init__.py"):
            used.add(((part_of(module), part_of(name)), place))
    assert used >= EXCEPTIONS.items()


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("t2lens.hooks.point", "from t2lens.model import Transformer"),
        ("t2lens.hooks.point", "def f():\n    import t2lens.zoo.text"),
        ("t2lens.hooks.point", "from ..model import Transformer"),
        ("t2lens.hooks.point", "from .. import model"),
        ("t2lens.hooks.point", "if TYPE_CHECKING:\n    from t2lens import trace"),
        ("t2lens.residual.base", "from t2lens import mixing"),
        ("t2lens.residual.base", "from t2lens import build"),
        ("t2lens.residual.base", "import importlib\nimportlib.import_module('t2lens.viz.page')"),
        ("t2lens.tracing", "from t2lens.viz import page"),  # allowed inside a function only
        ("t2lens.mixing", "def f():\n    from t2lens.model import build"),  # allowed for types only
        ("t2lens.mixing", "if TYPE_CHECKING:\n    pass\nelse:\n    from t2lens.model import build"),
        ("t2lens.tracing", "def f():\n    from t2lens.apps import dashboard"),
        ("t2lens.store.reader", "import streamlit as st"),
        ("t2lens.cli", "import plotly.graph_objects as go"),
        ("t2lens.model", "from transformer_lens import HookedRootModule"),
        ("t2lens.viz.page", "import torch"),
        ("t2lens.apps.views.lens", "import torch"),
        ("t2lens.apps.views.lens", "from t2lens.apps.views.gates import PAGE"),
        ("t2lens.apps.frame", "from t2lens.apps.views import PAGES"),
        ("t2lens.apps.components.picture", "def f():\n    from t2lens.apps.frame import Side"),
        ("t2lens.analysis.lens", "from t2lens.viz.labels import glyphs"),
        ("t2lens.model", "from hooks import HookPoint"),
        ("t2lens", "import streamlit"),
    ],
)
def test_a_planted_violation_is_caught(module: str, source: str):
    assert len(violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("t2lens.hooks.point", "import torch\nfrom transformer_lens import HookedRootModule"),
        ("t2lens.residual.base", "from ..hooks import HookPoint\nfrom t2lens.config import Standard"),
        ("t2lens.tracing", "def f():\n    from t2lens.viz import page"),
        ("t2lens.mixing", "if TYPE_CHECKING:\n    from t2lens.model import Transformer"),
        ("t2lens.cli", "from t2lens import load, trace\nfrom t2lens.apps import dashboard"),
        ("t2lens.apps.dashboard", "import streamlit as st\nfrom t2lens.viz import figures"),
        ("t2lens.apps.dashboard", "from t2lens.apps.views import PAGES"),
        ("t2lens.apps.views", "from t2lens.apps.views import lens"),
        ("t2lens.apps.nodes", "if TYPE_CHECKING:\n    from t2lens.apps.frame import Frame"),
    ],
)
def test_a_permitted_import_passes(module: str, source: str):
    assert violations(module, source) == []


def test_relative_imports_count_from_the_package_of_an_init_file():
    assert imports("from .point import X", "t2lens.hooks", True) == [("t2lens.hooks.point.X", "module")]
    assert imports("from ..config import X", "t2lens.residual.base", False) == [("t2lens.config.X", "module")]


def test_importing_t2lens_imports_no_heavy_library():
    heavy = ["numpy", "torch", "transformer_lens", "xarray", "plotly", "streamlit"]
    code = f"import sys, t2lens; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
