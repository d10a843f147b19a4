"""How a recipe's YAML is read. The library is handed in, since a box reads JSON and does without it."""

from __future__ import annotations

import re
from types import ModuleType
from typing import Any

_BOOL, _MERGE = "tag:yaml.org,2002:bool", "tag:yaml.org,2002:merge"
_TRUE_OR_FALSE = re.compile("^(?:true|True|TRUE|false|False|FALSE)$")


def read_yaml(text: str, yaml: ModuleType) -> Any:
    """What stands in `text`, by PyYAML's safe loader, but that `on`, `off`, `yes` and `no` are words, as in YAML 1.2: otherwise `cuda_graphs: off` and
    `countries: [NO]` are false. yaml.MarkedYAMLError where it is no YAML, or a key stands twice, of which the library keeps the last and says nothing."""

    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        yaml_implicit_resolvers = {
            first: [(tag, words) for tag, words in found if tag != _BOOL]
            for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
        }

        def compose_mapping_node(self, anchor: str | None) -> Any:
            node = super().compose_mapping_node(anchor)
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                    line = key.start_mark.line + 1
                    if key.value in lines:
                        raise yaml.composer.ComposerError(
                            None,
                            None,
                            f"key '{key.value}' stands in line {lines[key.value]}, too; want it once",
                            key.start_mark,
                        )
                    lines[key.value] = line
            return node

    Loader.add_implicit_resolver(_BOOL, _TRUE_OR_FALSE, list("tTfF"))
    return yaml.load(text, Loader)
