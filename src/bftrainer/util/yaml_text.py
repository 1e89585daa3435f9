"""YAML as text: a loader that guesses no numbers, dates or booleans and refuses duplicate keys."""

from __future__ import annotations

from typing import Any

import yaml


class TextLoader(yaml.BaseLoader):
    """Loads only texts, and lists and mappings of texts: `1e-4` among a script's arguments stays as it is.

    It is even safer than `yaml.safe_load`, which expands merge keys without bound.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping; refuse one with a duplicate key."""
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key occurs twice", node.start_mark)
        return found
