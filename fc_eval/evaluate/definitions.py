"""Definitions of lm-eval tasks as files: what a YAML file says once its includes are merged, and every file behind it.

Read without lm-eval, because a fingerprint is made where no heavy library may be loaded, and its index of 14,000
definitions takes most of a minute to build; it is asked only for names that no file states by itself.
"""

import difflib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fc_eval.errors import FcEvalError, os_error, unknown
from fc_eval.evaluate.data import EMBEDDED
from fc_eval.evaluate.own_code import code_files

# What of a group's settings its tasks inherit, as far as data are concerned.
DATA_KEYS = ("dataset_path", "dataset_name", "dataset_kwargs", "custom_dataset", "class")


@dataclass(frozen=True)
class Definition:
    """One task, or group of tasks.

    Attributes:
        settings: as the file says, `!function` references as plain text.
        files: the YAML file, those that it includes, and the Python files beside them whose functions it names, with
            the modules beside those that they import.
        imported: functions that it names which lie in an installed package instead.
    """

    settings: Mapping[str, Any]
    files: tuple[Path, ...] = ()
    imported: tuple[str, ...] = ()


def read_definition(path: Path, above: tuple[Path, ...] = ()) -> Definition:
    """Reads a task's YAML file with all that it includes; `above` are the files that include it.

    Raises:
        FcEvalError: a file is missing or is no YAML mapping, or files include each other.
    """
    path = path.expanduser().resolve()
    if path in above:
        raise FcEvalError(f"{path} includes itself: leave out one `include`")
    functions: list[str] = []

    class Loader(yaml.SafeLoader):
        pass

    def function(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> str:
        functions.append(str(loader.construct_scalar(node)))
        return functions[-1]

    Loader.add_constructor("!function", function)
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except OSError as error:
        raise os_error(error, path) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise FcEvalError(f"{path} is not complete YAML: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise FcEvalError(f"{path} holds no mapping: expected the definition of an lm-eval task")
    files, imported = [path], []
    for name in functions:
        file = path.parent / f"{name.rpartition('.')[0].replace('.', '/')}.py"
        if file.is_file():
            files += code_files(file)
        else:
            imported.append(name)
    included = settings.pop("include", None) or []
    merged: dict[str, Any] = {}
    for name in included if isinstance(included, list) else [included]:
        inner = read_definition(path.parent / str(name), (*above, path))
        merged |= inner.settings
        files += inner.files
        imported += inner.imported
    return Definition(merged | settings, tuple(dict.fromkeys(files)), tuple(dict.fromkeys(imported)))


def tasks_of_file(path: Path) -> Iterator[Definition]:
    """The tasks that a YAML file defines: one, or those of a group; raises as `read_definition`."""
    yield from _tasks(read_definition(path), lambda name: None, {})


def tasks_named(name: str) -> Iterator[Definition]:
    """The tasks behind a name that lm-eval knows: a task, a group or a tag.

    Raises:
        FcEvalError: it is not among them; the nearest names are given.
    """
    if _find(name) is None:
        near = difflib.get_close_matches(name, _index(), n=3, cutoff=0.5)
        raise unknown("lm-eval task", name, near, hint="`lm-eval ls tasks` lists them")
    yield from _named(name, _find, {})


class Entry(NamedTuple):
    """What a name stands for: the file that defines it, or, for a tag, the names of the tasks that bear it."""

    yaml_path: Path | None
    tags: Iterable[str] = ()


Find = Callable[[str], Entry | None]


def _find(name: str) -> Entry | None:
    """Looks for the file that states the name, in a second; tags and inherited names are left to lm-eval's index."""
    stated = re.compile(rb"^(?:task|group):[ ]*[\"']?%s[\"']?\s*(?:#.*)?$" % re.escape(name.encode()), re.M)
    paths = (path for path, text in _texts().items() if name.encode() in text and stated.search(text))
    first = next(paths, None)
    return Entry(first) if first is not None else _index().get(name)


@cache
def _texts() -> Mapping[Path, bytes]:
    """Every definition that the installed lm-eval brings, in the order in which it reads them."""
    spec = importlib.util.find_spec("lm_eval")
    places = spec.submodule_search_locations if spec is not None else None
    paths = (path for place in places or [] for path in (Path(place) / "tasks").glob("**/*.yaml"))
    return {path: path.read_bytes() for path in sorted(paths, key=lambda path: path.as_posix())}


@cache
def _index() -> Mapping[str, Any]:
    """lm-eval's own index of names; takes most of a minute."""
    from lm_eval.tasks import TaskManager

    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        index: Mapping[str, Any] = TaskManager(include_path=str(EMBEDDED)).task_index
    finally:
        logger.setLevel(level)
    return index


def _named(name: str, find: Find, inherited: Mapping[str, Any]) -> Iterator[Definition]:
    entry = find(name)
    if entry is None:  # a group may define a task on the spot
        yield Definition(inherited)
    elif entry.yaml_path is None:  # a tag stands for the tasks that bear it
        for tagged in sorted(entry.tags):
            yield from _named(tagged, find, inherited)
    else:
        yield from _tasks(read_definition(Path(entry.yaml_path)), find, inherited)


def _tasks(found: Definition, find: Find, inherited: Mapping[str, Any]) -> Iterator[Definition]:
    """A task itself, or the tasks of a group, which inherit its settings; the group's own file counts for each."""
    members = found.settings.get("task")
    if not isinstance(members, list):
        yield Definition({**found.settings, **inherited}, found.files, found.imported)
        return
    above = {key: found.settings[key] for key in DATA_KEYS if key in found.settings} | dict(inherited)
    for member in members:
        own = member if isinstance(member, dict) else {"task": member}
        passed = above | {key: own[key] for key in DATA_KEYS if key in own}
        name = own.get("task", own.get("group"))
        inner = _tasks(Definition(own), find, above) if isinstance(name, list) else _named(str(name), find, passed)
        for task in inner:
            files = tuple(dict.fromkeys((*found.files, *task.files)))
            yield Definition({"task": name, **task.settings}, files, (*found.imported, *task.imported))
