"""Who may import whom: every file of the package is read and held against the table."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "megaparcae"

ALLOWED = {
    "config": set(),
    "ops": set(),
    "model": {"config", "ops"},
    "parallel": {"config"},
    "data": {"config"},
    "optim": {"config"},
    "launcher": {"config"},
    "engine": {"config", "parallel"},
    "checkpoint": {"config", "parallel.shard"},
    "hf": {"config", "model", "checkpoint"},
    "eval": {"config", "model", "data"},
    "scaling": {"config", "model.flops"},
    "plan": {
        *("config", "scaling", "data.sampler", "optim.param_groups", "engine.ds_config"),
        *("parallel.ownership", "parallel.shard", "parallel.stages", "train.pipeline_report"),
        *("model.draws", "model.expected_depth", "model.flops", "model.loop_plan"),
    },
    "report": {"config", "model.flops"},
}
ALLOWED["bench"] = {*ALLOWED, "train"}
"""What a package may import besides itself, `log` and `errors`; `train` may import everything."""

STAND_ALONE = tuple(
    f"hf/{part}_parcae.py"
    for part in ("configuration", "cache", "decode", "blocks", "early_exit", "modeling")
)
"""Copied into every export, so they stand alone."""

OPEN_TO_ALL = {"log", "errors"}
DEEPSPEED_USERS = ("engine", "launcher")


def files() -> list[str]:
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


def imported_modules(path: Path) -> list[str]:
    """Dotted names of all imports of a file, also those inside functions."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names]
    return names


def ours(file: str) -> list[str]:
    """Imports of this package, without its name; relative ones keep their dot."""
    names = imported_modules(PACKAGE / file)
    prefix = "megaparcae."
    return [n.removeprefix(prefix) for n in names if n.startswith((prefix, "."))]


def is_within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def allowed_in(file: str) -> set[str]:
    package = file.split("/")[0].removesuffix(".py")
    if file in STAND_ALONE:
        # The form that transformers asks of a model folder.
        return {"." + stand_alone[3:-3] for stand_alone in STAND_ALONE}
    if package in OPEN_TO_ALL:
        return OPEN_TO_ALL
    return OPEN_TO_ALL | ALLOWED[package] | {package}


def test_a_package_imports_only_what_the_table_allows():
    wrong = {
        file: names
        for file in files()
        if file.split("/")[0] not in ("train", "__init__.py")
        and (names := [n for n in ours(file) if not is_within(n, allowed_in(file))])
    }
    assert not wrong, {file: (names, sorted(allowed_in(file))) for file, names in wrong.items()}


def test_deepspeed_is_imported_by_the_engine_and_the_launcher_only():
    wrong = [
        file
        for file in files()
        if file.split("/")[0] not in DEEPSPEED_USERS
        and any(n.split(".")[0] == "deepspeed" for n in imported_modules(PACKAGE / file))
    ]
    assert not wrong


def test_config_and_launcher_do_without_torch():
    for package in ("config", "launcher"):
        for path in (PACKAGE / package).rglob("*.py"):
            names = {name.split(".")[0] for name in imported_modules(path)}
            assert not names & {"torch", "numpy", "deepspeed"}, path


def test_only_the_logger_prints():
    """`print` is for command lines (run through `run_command`), not for the library."""
    wrong = [
        file
        for file in files()
        if file.split("/")[-1] not in ("errors.py", "__main__.py", "command.py")
        for call in ast.walk(ast.parse((PACKAGE / file).read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id == "print"
    ]
    assert not wrong


def test_every_folder_is_a_package():
    """A folder without __init__.py would be left out of an installation."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_the_top_level_stays_as_it_is():
    """Settings of tools live in hidden files."""
    fixed = {"megaparcae", "launch", "ds_configs", "tools", "tests", "setup.py", "README.md"}
    made = {"runs", "build", "dist", "megaparcae.egg-info"}
    found = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert found <= fixed | made
