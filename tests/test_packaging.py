"""The package installs as a wheel, as a wheel made from the sdist and editable: complete, under one name."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# folder in the tree: folder in the wheel
SOURCES = {"t2lens": "t2lens", "hooks": "t2lens/hooks", "apps": "t2lens/apps"}

# Asserted inside each installation. `-I` keeps the current folder and PYTHONPATH out of the import path.
INSTALLED = """
import importlib.util, pathlib, sys
import t2lens.hooks, t2lens.apps
for name in ("hooks", "apps"):
    assert importlib.util.find_spec(name) is None, f"a top-level {name!r} is importable"
    package = sys.modules[f"t2lens.{name}"]
    assert package.__name__ == f"t2lens.{name}" and package.__file__ is not None
    print(pathlib.Path(package.__file__).resolve().parent)
print(pathlib.Path(t2lens.__file__).resolve().parent)
"""


def run(*command: str | Path, cwd: Path) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build_wheel(source: Path, out: Path, *kind: str) -> Path:
    run(sys.executable, "-m", "build", "--no-isolation", *kind, "--outdir", out, source, cwd=out)
    return next(out.glob("*.whl"))


def tree(root: Path) -> set[str]:
    """Every file that belongs to the package, by the name it has in a wheel."""
    files = set()
    for folder, target in SOURCES.items():
        for path in (root / folder).rglob("*"):  # does not descend into the symlinks
            parts = path.relative_to(root / folder).parts
            if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in parts):
                files.add("/".join((target, *parts)))
    return files


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, so that building leaves nothing behind in the repository."""
    copy = tmp_path_factory.mktemp("checkout")
    ignore = shutil.ignore_patterns("__pycache__", ".*")
    for folder in SOURCES:
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel"), "--wheel")


@pytest.fixture(scope="module")
def wheel_from_sdist(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Told no kind, build makes the sdist first and the wheel from that.
    return build_wheel(checkout, tmp_path_factory.mktemp("wheel_from_sdist"))


def install(environment: Path, *what: str | Path) -> list[Path]:
    """Install into a new environment that borrows this one's dependencies; folders of hooks, apps, t2lens."""
    venv.create(environment, with_pip=False, symlinks=sys.platform != "win32")
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    site = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=environment)
    # Python reads no .pth files in a folder that a .pth file names: an editable t2lens over there stays out.
    Path(site.strip(), "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "--disable-pip-version-check",
        "install",
        "--quiet",
    ]
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(*pip, *options, *what, cwd=environment)
    return [Path(line) for line in run(python, "-I", "-c", INSTALLED, cwd=environment).split("\n")[:3]]


def test_package_list_equals_the_tree():
    packages = {name.rsplit("/", 1)[0].replace("/", ".") for name in tree(ROOT) if name.endswith(".py")}
    assert sorted(PYPROJECT["tool"]["setuptools"]["packages"]) == sorted(packages)


def test_every_package_has_an_init_file():
    files = tree(ROOT)
    folders = {name.rsplit("/", 1)[0] for name in files if name.endswith(".py")}
    assert [folder for folder in sorted(folders) if f"{folder}/__init__.py" not in files] == []


def test_wheel_holds_every_file_of_the_tree(checkout: Path, wheel: Path):
    files = wheel_files(wheel)
    assert sorted(files) == sorted(tree(checkout))
    assert "t2lens/py.typed" in files


# so that what holds of one, installed, holds of the other
def test_wheel_from_sdist_is_the_same_wheel(wheel: Path, wheel_from_sdist: Path):
    assert wheel_files(wheel_from_sdist) == wheel_files(wheel)


def test_installed_wheel_imports_under_one_name(wheel: Path, tmp_path: Path):
    environment = tmp_path / "env"
    folders = install(environment, wheel)
    assert all(folder.is_relative_to(environment.resolve()) for folder in folders), folders


def test_editable_install_imports_the_checkout_under_one_name(checkout: Path, tmp_path: Path):
    copy = tmp_path / "checkout"  # an editable install writes its metadata beside the sources
    shutil.copytree(checkout, copy, symlinks=True)
    folders = install(tmp_path / "env", "--editable", copy)
    assert folders == [(copy / name).resolve() for name in ("hooks", "apps", "t2lens")]


@pytest.mark.parametrize("name", ["hooks", "apps"])
def test_importing_from_the_root_under_the_bare_name_says_the_right_one(name: str):
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert f"ImportError: import this package as 't2lens.{name}'" in done.stderr


def test_every_direct_dependency_is_pinned_inside_its_range():
    pins = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            (clause,) = pin.specifier
            assert clause.operator == "==", f"{line!r} is not an exact pin"
            pins[pin.name.lower().replace("_", "-")] = clause.version
    project = PYPROJECT["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras["test"], *extras["dev"]]:
        wanted = Requirement(text)
        if wanted.name != project["name"]:
            pinned = pins[wanted.name.lower()]
            assert wanted.specifier.contains(pinned), f"pyproject.toml wants {text!r}, the pin is {pinned}"
