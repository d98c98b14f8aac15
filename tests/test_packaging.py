"""The installed package: what importing it needs, what it offers, which way imports point."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("herald_jax", "pallas_kernels", "convert")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# A backend of this name does not exist: whatever asks JAX for a device at import time fails.
NO_BACKEND = {"JAX_PLATFORMS": "none_such"}


def imported_modules(path: Path, *, top_level_only: bool) -> Iterator[str]:
    """Names of modules that a file imports; on request only those imported when it is."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_import_needs_neither_torch_nor_a_device(run_python, package):
    run_python(
        f"import sys, {package}\n"
        "loaded = {'torch', 'transformers'} & set(sys.modules)\n"
        "assert not loaded, f'importing {loaded} is left to those who use it'",
        env=NO_BACKEND,
    )


def test_every_module_imports_without_the_extras(run_python):
    """A name that is None in `sys.modules` cannot be imported."""
    run_python(
        "import importlib, pkgutil, sys\n"
        "for extra in ('torch', 'transformers', 'matplotlib', 'beartype', 'pytest', 'fastapi',\n"
        "              'uvicorn', 'prometheus_client', 'httpx', 'openai'):\n"
        "    sys.modules[extra] = None\n"
        f"for name in {PACKAGES!r}:\n"
        "    package = importlib.import_module(name)\n"
        "    for module in pkgutil.walk_packages(package.__path__, name + '.'):\n"
        "        importlib.import_module(module.name)\n",
        env=NO_BACKEND,
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_exist(package):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", ())
    assert len(set(names)) == len(names)
    missing = [name for name in names if not hasattr(module, name)]
    assert not missing


def test_herald_jax_lists_its_public_names():
    assert importlib.import_module("herald_jax").__all__


@pytest.mark.parametrize("command", sorted(PROJECT["scripts"]))
def test_command_prints_help_without_the_extras(run_python, command):
    module, function = PROJECT["scripts"][command].split(":")
    printed = run_python(
        "import sys\n"
        "sys.modules['torch'] = sys.modules['transformers'] = None\n"
        f"sys.argv = [{command!r}, '--help']\n"
        f"from {module} import {function} as main\n"
        "sys.exit(main())",
        env=NO_BACKEND,
    )
    assert command in printed


def test_version_is_the_same_everywhere():
    version = PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## \[?(\d+\.\d+\.\d+)", changelog, flags=re.MULTILINE)
    assert releases and releases[0] == version, "the newest release in CHANGELOG.md"
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(rf"^version: {re.escape(version)}$", citation, flags=re.MULTILINE)
    module = importlib.import_module("herald_jax")
    assert getattr(module, "__version__", version) == version


def test_dependencies_have_floors_and_no_upper_bounds():
    extras = PROJECT["optional-dependencies"]
    for requirement in [*PROJECT["dependencies"], *(r for group in extras.values() for r in group)]:
        assert ">=" in requirement, requirement
        assert not re.search(r"[<]|==|~=", requirement), requirement


def test_base_dependencies_cover_what_is_imported_at_the_top_of_modules():
    import sys

    provided = {re.split(r"[\[<>=]", name)[0].replace("-", "_") for name in PROJECT["dependencies"]}
    allowed = {*PACKAGES, *sys.stdlib_module_names, *provided, "orbax", "ml_dtypes", "jaxlib"}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            names = {name.split(".")[0] for name in imported_modules(path, top_level_only=True)}
            assert names <= allowed, f"{path}: {sorted(names - allowed)}"


@pytest.mark.parametrize(
    ("importer", "forbidden"),
    [
        ("pallas_kernels", ("herald_jax", "convert")),
        ("convert", ("herald_jax.engine",)),
        ("herald_jax/models", ("herald_jax.engine", "herald_jax.llm")),
        ("herald_jax/cache", ("herald_jax.engine", "herald_jax.llm")),
        ("herald_jax/decoding", ("herald_jax.engine", "herald_jax.llm")),
        ("herald_jax/engine", ("herald_jax.llm",)),
        ("herald_jax/engine/scheduler.py", ("jax", "flax", "numpy")),
    ],
)
def test_imports_point_one_way(importer, forbidden):
    """Lower layers do not know upper ones; the scheduler can be tested without JAX."""
    target = ROOT / importer
    paths = [target] if target.suffix else sorted(target.rglob("*.py"))
    assert paths
    for path in paths:
        for name in imported_modules(path, top_level_only=False):
            hits = [bad for bad in forbidden if name == bad or name.startswith(bad + ".")]
            assert not hits, f"{path.relative_to(ROOT)} imports {name}"
