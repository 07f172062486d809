"""YAML to RunConfig and back: preset, then file, then --set; strict about names and types.

config = load_config("launch/configs/pretrain_tiny.yaml", ["train.num_steps=20"])
load_config(path_of(dump_config(config))) == config
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from megaparcae.config.presets import PRESETS
from megaparcae.config.schema import DatasetConfig, RunConfig
from megaparcae.config.yaml_text import Tree, kind_of, parse_yaml, read_yaml
from megaparcae.errors import UserError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run's YAML, apply `section.key=value` overrides (values in YAML), check everything.

    `data.train: prefix` and `data.train: [a, b]` are short for a list of {prefix, weight}.
    Raises UserError, with the file or the override named, for anything that does not add up.
    """
    return _overridden(read_yaml(path), overrides, where=str(path))


def preset_config(name: str | None, overrides: Sequence[str] = ()) -> RunConfig:
    """A preset (None: the schema's defaults) without a file, overrides as in `load_config`."""
    return _overridden({"preset": name}, overrides, where="--preset")


def _overridden(tree: Tree, overrides: Sequence[str], *, where: str) -> RunConfig:
    origin: dict[str, str] = {}
    for override in overrides:
        _apply_override(tree, override, origin)
    return build_config(tree, where=where, origin=origin)


def build_config(
    tree: Mapping[str, Any], *, where: str, origin: Mapping[str, str] | None = None
) -> RunConfig:
    """A nested mapping as a checked RunConfig; `where` and `origin` (by dotted key) name the source
    of a value in messages."""
    source = _Source(where, origin or {})
    try:
        merged = _merge(_preset_tree(tree.get("preset"), source), tree)
        config = source.build(RunConfig, merged, "")
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{where}: {error}") from error
    assert isinstance(config, RunConfig)
    return config


def dump_config(config: RunConfig) -> str:
    """The effective configuration as YAML: every option, read back equal by load_config."""
    text: str = yaml.safe_dump(config_tree(config), sort_keys=False, allow_unicode=True, width=100)
    return text


def config_tree(config: RunConfig) -> Tree:
    """The configuration as plain mappings and lists."""
    tree = _plain(dataclasses.asdict(config))
    assert isinstance(tree, dict)
    return tree


def config_differences(a: RunConfig, b: RunConfig) -> list[str]:
    """Dotted names of the options in which two configurations differ."""
    return _differences(config_tree(a), config_tree(b), "")


@dataclasses.dataclass(frozen=True)
class _Source:
    """Turns plain values into typed ones and knows where each came from."""

    where: str
    origin: Mapping[str, str]

    def fail(self, key: str, message: str) -> UserError:
        option = key.split("[")[0]  # an entry of a list comes from where the list comes from
        return UserError(f"{self.origin.get(option, self.where)}: {message}")

    def build(self, cls: type[Any], tree: object, key: str) -> Any:
        if not isinstance(tree, Mapping):
            if tree is None:  # `data:` with nothing below it
                tree = {}
            else:
                raise self.fail(key, f"{key} is a section, not {kind_of(tree)}; set its options")
        hints = get_type_hints(cls)
        for name in tree:
            if name not in hints:
                raise self.fail(_join(key, name), _unknown(_join(key, name), list(hints)))
        missing = [
            f.name
            for f in dataclasses.fields(cls)
            if f.name not in tree
            and f.default is dataclasses.MISSING
            and f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise self.fail(key, f"{_join(key, missing[0])} is missing; it has no default")
        return cls(
            **{name: self.convert(v, hints[name], _join(key, name)) for name, v in tree.items()}
        )

    def convert(self, value: object, kind: Any, key: str) -> Any:
        """The value as `kind`; UserError when it is something else."""
        origin, args = get_origin(kind), get_args(kind)
        if origin in (Union, UnionType):
            if value is None and type(None) in args:
                return None
            (inner,) = (a for a in args if a is not type(None))
            return self.convert(value, inner, key)
        if origin is Literal:
            return self._choice(value, args, key)
        if origin is tuple:
            return self._tuple(value, args, key)
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            if kind is DatasetConfig and isinstance(value, str):
                value = {"prefix": value}
            return self.build(kind, value, key)
        return self._scalar(value, kind, key)

    def _choice(self, value: object, choices: tuple[Any, ...], key: str) -> Any:
        for choice in choices:
            if value == choice and type(value) is type(choice):
                return choice
        allowed = ", ".join(str(c) for c in choices)
        near = difflib.get_close_matches(str(value), [str(c) for c in choices], n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise self.fail(key, f"{key}={_shown(value)}: choose {allowed}{hint}")

    def _tuple(self, value: object, args: tuple[Any, ...], key: str) -> tuple[Any, ...]:
        if args[0] is DatasetConfig and isinstance(value, str):
            value = [value]
        if not isinstance(value, list | tuple):
            raise self.fail(key, f"{key}={_shown(value)} must be a list, such as [1, 2]")
        kinds = [args[0]] * len(value) if args[-1] is Ellipsis else list(args)
        if len(kinds) != len(value):
            raise self.fail(key, f"{key}={_shown(value)} must have {len(kinds)} entries")
        return tuple(
            self.convert(item, kind, f"{key}[{i}]")
            for i, (item, kind) in enumerate(zip(value, kinds, strict=True))
        )

    def _scalar(self, value: object, kind: type[Any], key: str) -> Any:
        if kind is float:
            return self._float(value, key)
        if type(value) is kind:  # not isinstance: true is no int
            return value
        remedy = {
            int: "a whole number",
            str: f'a text; write "{value}" in quotes',
            bool: "true or false",
        }[kind]
        if kind is str and isinstance(value, dict | list | None):
            remedy = "a text"
        raise self.fail(key, f"{key}={_shown(value)} must be {remedy}, not {kind_of(value)}")

    def _float(self, value: object, key: str) -> float:
        if isinstance(value, str):  # YAML 1.1 reads 8e-3 as text: it wants 8.0e-3
            try:
                value = float(value)
            except ValueError:
                raise self.fail(key, f"{key}={_shown(value)} must be a number") from None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"{key}={_shown(value)} must be a number, not {kind_of(value)}")
        if not math.isfinite(value):
            raise self.fail(key, f"{key}={value} must be finite")
        return float(value)


def _preset_tree(name: object, source: _Source) -> Tree:
    if name is None:
        return {}
    if not isinstance(name, str) or name not in PRESETS:
        near = difflib.get_close_matches(str(name), PRESETS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise source.fail("preset", f"preset={name!r}: choose {', '.join(PRESETS)}{hint}")
    return PRESETS[name]


def _merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> Tree:
    """`top` over `base`, section by section."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(below, value)
        elif not (isinstance(below, Mapping) and value is None):
            merged[key] = value
    return merged


def _apply_override(tree: Tree, override: str, origin: dict[str, str]) -> None:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"--set {override}: must be section.key=value, such as train.num_steps=100")
    value = parse_yaml(text, where=f"--set {override}: the value is not YAML")
    *sections, last = key.split(".")
    node = tree
    for section in sections:
        child = node.get(section)
        if not isinstance(child, dict):
            child = node[section] = {}
        node = child
    node[last] = value
    origin[key] = f"--set {override}"


def _unknown(key: str, siblings: list[str]) -> str:
    section, _, name = key.rpartition(".")
    near = difflib.get_close_matches(name, siblings, n=1)
    elsewhere = [path for path in _all_options(RunConfig, "") if path.split(".")[-1] == name]
    suggestion = _join(section, near[0]) if near else elsewhere[0] if elsewhere else None
    if suggestion is None:
        return f"unknown option {key}; {section or 'the top level'} has {', '.join(siblings)}"
    return f"unknown option {key}; did you mean {suggestion}?"


def _all_options(cls: type[Any], key: str) -> list[str]:
    found = []
    for name, kind in get_type_hints(cls).items():
        found.append(_join(key, name))
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            found += _all_options(kind, _join(key, name))
    return found


def _differences(a: object, b: object, key: str) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        return [d for name in a for d in _differences(a[name], b[name], _join(key, name))]
    return [] if a == b else [key]


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _join(section: str, name: object) -> str:
    return f"{section}.{name}" if section else str(name)


def _shown(value: object) -> str:
    return "null" if value is None else repr(value)
