"""Python files that a task's own code consists of: the one that its YAML names, and the local modules it imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

from fc_eval.errors import os_error


def code_files(file: Path) -> tuple[Path, ...]:
    """A Python file and every module beside it that it imports, and those that these import in turn.

    Read, not run: a module that is imported under a computed name, and data that code opens, are not found.

    Raises:
        FcEvalError: a file cannot be read.
    """
    found, waiting = [file], [file]
    while waiting:
        current = waiting.pop()
        for folder in dict.fromkeys((current.parent, file.parent)):
            new = [path for path in _local_imports(current, folder) if path not in found]
            found += dict.fromkeys(new)
            waiting += dict.fromkeys(new)
    return tuple(found)


def _local_imports(file: Path, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(file.read_bytes())
    except OSError as error:
        raise os_error(error, file) from None
    except (SyntaxError, ValueError):  # whoever imports it says so
        return
    for node in ast.walk(tree):
        names: list[str] = []
        base = folder
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = file.parents[node.level - 1]
            module = node.module or ""
            # `from package import module` may name a file as well as something inside of one
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        for name in filter(None, names):
            parts = name.split(".")
            for length in range(1, len(parts) + 1):  # importing a.b runs a/__init__.py first
                place = base.joinpath(*parts[:length])
                yield from (path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file())
