"""
A LiteLLM configuration as a tree that knows where each of its parts stands.

Whoever reads it must be able to say of every entry where it is and what became of it, so nothing is turned into plain
dictionaries here: those have lost their lines. Only plain data is read; a tag that would make an object is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, TypeAlias

import msgspec
import yaml

#: Parts of one configuration, what its aliases repeat counted each time: a few lines of aliases can stand for billions.
_MOST_PARTS: Final = 100_000
_DEEPEST: Final = 50
#: Files that may be included, one by another.
_MOST_FILES: Final = 50

Value: TypeAlias = "str | int | float | bool | dict[str, Node] | list[Node] | None"


class Unreadable(Exception):
    """The file cannot be read as a configuration. The message says where and why."""


class Node(msgspec.Struct, eq=False):
    """One part of the file. Two are the same only where they are one."""

    #: As `model_list[0].litellm_params.model`; empty for the whole.
    path: str
    #: As `config.yaml:12`.
    place: str
    value: Value
    #: What stands in the file; empty but for a scalar.
    raw: str = ""

    def get(self, name: str) -> Node | None:
        """A member; None where there is none, or this has no members."""
        return self.value.get(name) if isinstance(self.value, dict) else None

    @property
    def members(self) -> dict[str, Node]:
        return self.value if isinstance(self.value, dict) else {}

    @property
    def items(self) -> list[Node]:
        return self.value if isinstance(self.value, list) else []

    @property
    def text(self) -> str | None:
        """Of a scalar that is text."""
        return self.value if isinstance(self.value, str) else None

    def children(self) -> Iterator[Node]:
        yield from self.members.values()
        yield from self.items

    def leaves(self) -> Iterator[Node]:
        """What has no parts of its own."""
        if not self.members and not self.items:
            yield self
        for child in self.children():
            yield from child.leaves()

    def plain(self) -> Any:
        """Without its places."""
        if isinstance(self.value, dict):
            return {name: child.plain() for name, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def read(file: Path) -> Node:
    """
    The file with those it includes, as LiteLLM puts them together: a list of an included file goes on one that is
    there, anything else takes its place. Raises Unreadable.
    """
    whole = _one(file)
    waiting = [(file, node) for node in _included(whole)]
    seen = 0
    while waiting:
        by, node = waiting.pop(0)
        seen += 1
        if seen > _MOST_FILES:
            raise Unreadable(f"{node.place}: more than {_MOST_FILES} files are included")
        if not node.text:
            raise Unreadable(f"{node.place}: {node.path}: is no name of a file")
        other = by.parent / node.text
        found = _one(other)
        waiting += [(other, inner) for inner in _included(found)]
        for name, child in found.members.items():
            mine = whole.members.get(name)
            if name == "include":
                continue
            if mine is not None and isinstance(mine.value, list) and isinstance(child.value, list):
                mine.value.extend(child.value)
            else:
                whole.members[name] = child
    whole.members.pop("include", None)
    return whole


def _included(node: Node) -> list[Node]:
    include = node.get("include")
    if include is None:
        return []
    if not isinstance(include.value, list):
        raise Unreadable(f"{include.place}: include: must be a list of files")
    return include.items


def _one(file: Path) -> Node:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Unreadable(f"{file}: there is no such file") from None
    except OSError as error:
        raise Unreadable(f"{file}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise Unreadable(f"{file}: is not UTF-8") from None
    return parse(text, str(file))


def parse(text: str, name: str) -> Node:
    """One document. Raises Unreadable with the line."""
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise Unreadable(f"{name}: is empty")
            if not isinstance(root, yaml.MappingNode):
                raise Unreadable(f"{name}:{_line(root)}: is not a mapping, as a configuration is")
            return _Tree(loader, name).node(root, "", 0)
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise Unreadable(f"{where}: is not YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        # What is no character of YAML: its message names the position.
        raise Unreadable(f"{name}: is not YAML: {error}".partition("\n")[0]) from None
    except RecursionError:
        raise Unreadable(f"{name}: is nested too deeply") from None


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


class _Tree:
    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self._loader = loader
        self._name = name
        self._parts = 0

    def node(self, found: yaml.Node, path: str, depth: int) -> Node:
        self._parts += 1
        place = f"{self._name}:{_line(found)}"
        if self._parts > _MOST_PARTS:
            raise Unreadable(f"{place}: it has more than {_MOST_PARTS} parts, what aliases repeat counted")
        if depth > _DEEPEST:
            raise Unreadable(f"{place}: is nested more than {_DEEPEST} deep")
        if isinstance(found, yaml.MappingNode):
            return Node(path, place, self._members(found, path, depth))
        if isinstance(found, yaml.SequenceNode):
            if found.tag != "tag:yaml.org,2002:seq":
                raise Unreadable(f"{place}: {path}: the tag {found.tag} is not read")
            return Node(
                path, place, [self.node(child, f"{path}[{at}]", depth + 1) for at, child in enumerate(found.value)]
            )
        try:
            value = self._loader.construct_object(found)
        except ValueError:
            # It has the look of a date or a number, and is none.
            value = found.value
        if not isinstance(value, str | int | float | bool | None):
            # A date, or bytes: nothing that is read here is one.
            value = str(found.value)
        return Node(path, place, value, str(found.value))

    def _members(self, found: yaml.MappingNode, path: str, depth: int) -> dict[str, Node]:
        if found.tag != "tag:yaml.org,2002:map":
            raise Unreadable(f"{self._name}:{_line(found)}: {path}: the tag {found.tag} is not read")
        own = {
            key.value
            for key, _ in found.value
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge"
        }
        if len(own) != sum(key.tag != "tag:yaml.org,2002:merge" for key, _ in found.value):
            self._refuse_twice(found)
        # What `<<` takes in stands first, so that the mapping's own members win.
        self._loader.flatten_mapping(found)
        members: dict[str, Node] = {}
        for key, child in found.value:
            name = str(key.value)
            at = f"{path}.{name}" if path else name
            members[name] = self.node(child, at, depth + 1)
        return members

    def _refuse_twice(self, found: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in found.value:
            if not isinstance(key, yaml.ScalarNode):
                raise Unreadable(f"{self._name}:{_line(key)}: a key must be text")
            if key.value in seen:
                raise Unreadable(f"{self._name}:{_line(key)}: the key {key.value[:64]!r} is there twice")
            seen.add(key.value)
