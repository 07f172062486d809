"""YAML as text: read strictly, with the place of what is wrong."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml

from megaparcae.errors import UserError

Tree = dict[str, Any]
"""Plain nested mapping, as YAML gives it."""


def read_yaml(path: str | Path) -> Tree:
    """A YAML file that holds a mapping; duplicate keys are an error, not the last one's win."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise UserError(f"{path}: no such configuration file{_similar_files(Path(path))}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file; a run's configuration is YAML") from None
    tree = parse_yaml(text, where=str(path))
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: must be a mapping of sections such as `train:`, not {kind_of(tree)}"
        )
    return tree


def parse_yaml(text: str, *, where: str) -> Any:
    """One YAML value; UserError beginning with `where` when it is none."""
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise UserError(f"{where}{_yaml_problem(error)}") from error


def kind_of(value: object) -> str:
    """What a person would call the type of a value."""
    names = {
        type(None): "nothing",
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "a text",
        list: "a list",
        tuple: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), type(value).__name__)


def _similar_files(path: Path) -> str:
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist"
    names = [p.name for p in path.parent.glob("*.y*ml")]
    near = difflib.get_close_matches(path.name, names, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _yaml_problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f":{mark.line + 1}:{mark.column + 1}: {error.problem or error.context}"
    return f": {error}"


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key that is given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                problem = f"the key {key!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping
