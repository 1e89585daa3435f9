"""Fills docs/reference.md when the site is built, so that it cannot go stale.

Commands come from the command line itself, the HTTP API from its OpenAPI description, the Python API from signatures
and docstrings in the source. mkdocs calls the `on_…` functions (mkdocs.yml, `hooks`). They also bring files that pages
link to outside `docs`, such as examples, into the site, and see that nothing in it asks another host for anything.
"""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = "reference.md"

PYTHON: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("bftrainer.elastic", ("init", "load_snapshot")),
    ("bftrainer.elastic.torch.run", ("Run",)),
    ("bftrainer.elastic.torch.data.batches", ("Batches",)),
    ("bftrainer.elastic.torch.state.training_state", ("Progress",)),
    ("bftrainer.elastic.torch.value", ("Value",)),
    ("bftrainer.elastic.torch.tracking.tracker", ("Tracker",)),
    ("bftrainer.elastic.torch.snapshots.loading", ("LoadedSnapshot",)),
    ("bftrainer.client", ("Client", "AsyncClient")),
    ("bftrainer.client.results", ("TrainerResults", "ResultFile")),
    ("bftrainer.hpo", ("optimize",)),
    ("bftrainer.client.api", ("find_controller", "ApiClient")),
    ("bftrainer.core.curve", ("Curve",)),
    ("bftrainer.core.trainer", ("Trainer",)),
    ("bftrainer.core.objective", ("throughput", "efficiency", "weighted", "find_objective")),
    ("bftrainer.core.pool", ("Fragment", "Event", "Pool")),
    ("bftrainer.core.trace", ("Window", "Trace")),
    ("bftrainer.allocate.problem", ("Claim", "Limits", "Problem", "Decision", "Allocator")),
    ("bftrainer.allocate.registry", ("make_allocator",)),
    ("bftrainer.allocate.place", ("place", "Placement", "Placed", "Stable", "Compact")),
    ("bftrainer.scheduler", ("Policy", "State", "Scheduler", "Plan", "Change")),
    ("bftrainer.simulate.study", ("Study", "simulate")),
    ("bftrainer.cluster.pools.base", ("Pool", "PoolHost")),
    ("bftrainer.errors", ("BFTrainerError", "InputError")),
)
"""What is meant to be called from outside, by module. One that is not in the source is left out."""


# The commands.


def commands() -> str:
    """What `--help` says, for every command."""
    import typer.main

    from bftrainer.cli.main import build

    root: Any = typer.main.get_command(build())
    return "\n\n".join(_command_sections(root, None, "bftrainer"))


def _command_sections(command: Any, parent: Any, name: str) -> list[str]:
    context = command.context_class(command, info_name=name.rpartition(" ")[2], parent=parent, max_content_width=100)
    inner = getattr(command, "commands", {})
    shown = [] if inner else [f"### `{name}`\n\n```text\n{command.get_help(context).strip()}\n```"]
    for word in sorted(inner):
        if not inner[word].hidden:
            shown += _command_sections(inner[word], context, f"{name} {word}")
    return shown


# The HTTP API.


def openapi() -> dict[str, Any]:
    """The description of the API, of an application that has nothing behind it."""
    from unittest.mock import MagicMock

    from bftrainer.cluster.http import app

    needed = [one for one in inspect.signature(app.build).parameters.values() if one.default is one.empty]
    found: dict[str, Any] = app.build(*(MagicMock() for _ in needed)).openapi()
    return found


def http() -> str:
    """Every path with its methods, its parameters and what it does."""
    sections = []
    for path, methods in openapi()["paths"].items():
        for method, about in methods.items():
            lines = [f"### `{method.upper()} {path}`", about.get("description") or about.get("summary", "")]
            rows = [
                f"| `{one['name']}` | {one['in']} | {_type(one['schema'])} | {_cell(one['schema'])} |"
                for one in about.get("parameters", [])
                if one["in"] != "header"
            ]
            if rows:
                lines.append("\n".join(("| parameter | in | type | default |", "| --- | --- | --- | --- |", *rows)))
            if "requestBody" in about:
                lines.append("The body is JSON.")
            sections.append("\n\n".join(lines))
    return "\n\n".join(sections)


def _type(schema: dict[str, Any]) -> str:
    kinds = [one.get("type", "any") for one in schema.get("anyOf", [schema])]
    bounds = [
        f"{words} {part[key]}"
        for part in schema.get("anyOf", [schema])
        for key, words in (("minimum", "at least"), ("maximum", "at most"), ("maxLength", "of at most"))
        if key in part
    ]
    return ", ".join((" or ".join(kind for kind in kinds if kind != "null"), *bounds))


def _cell(schema: dict[str, Any]) -> str:
    default = schema.get("default")
    return "" if default in (None, "") else f"`{str(default).lower() if isinstance(default, bool) else default}`"


# The Python API.


def python() -> str:
    """Signatures and docstrings of what is public."""
    sections = []
    for module, names in PYTHON:
        found = [_found(module, name) for name in names]
        sections += [_definition(module, *one) for one in found if one is not None]
    return "\n\n".join(sections)


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _found(module: str, name: str) -> tuple[Definition, list[str]] | None:
    """A class or function, and the lines of the file that defines it: of the module, or the one it takes it from."""
    path = source(module)
    text = path.read_text() if path else ""
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef | _FUNCTIONS) and node.name == name:
            return node, text.splitlines()
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return _found(node.module, name)
    return None


def source(module: str) -> Path | None:
    """The file of a module, if there is one."""
    base = ROOT / "src" / module.replace(".", "/")
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _definition(module: str, node: Definition, lines: list[str]) -> str:
    heading = f"### `{module}.{node.name}`"
    if not isinstance(node, ast.ClassDef):
        return f"{heading}\n\n```python\n{_signature(node)}\n```\n\n{_prose(node)}"
    parts = [heading, _prose(node)]
    fields = _fields(node, lines)
    if fields:
        parts.append("\n".join(("| field | type | |", "| --- | --- | --- |", *fields)))
    for method in node.body:
        if isinstance(method, _FUNCTIONS) and not method.name.startswith("_"):
            parts += [f"```python\n{_signature(method)}\n```", _prose(method)]
        elif isinstance(method, _FUNCTIONS) and method.name == "__init__" and "Made by" not in _prose(node):
            parts += [f"```python\n{_signature(method).replace('def __init__', node.name)}\n```", _prose(method)]
    return "\n\n".join(part for part in parts if part)


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    marks = [mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)]
    returns = ast.unparse(node.returns) if node.returns else ""
    if "property" in marks:
        return f"{node.name}: {returns}  # a property"
    head = "".join(f"@{mark}\n" for mark in marks if mark in ("classmethod", "staticmethod"))
    head += f"{'async ' if isinstance(node, ast.AsyncFunctionDef) else ''}def {node.name}"
    tail = f" -> {returns}" if returns else ""
    arguments = _arguments(node.args)
    line = f"{head}({', '.join(arguments)}){tail}"
    if len(line) <= 100:
        return line
    return f"{head}(\n" + "".join(f"    {one},\n" for one in arguments) + f"){tail}"


def _arguments(given: ast.arguments) -> list[str]:
    """The arguments as they are written, without the object itself."""
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    found = [_argument(one, default) for one, default in zip(plain, defaults, strict=True)]
    if plain and plain[0].arg in ("self", "cls"):
        del found[0]
    if given.vararg:
        found.append(f"*{_argument(given.vararg, None)}")
    elif given.kwonlyargs:
        found.append("*")
    found += [_argument(one, default) for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        found.append(f"**{_argument(given.kwarg, None)}")
    return found


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(one.annotation)}" if one.annotation else ""
    if default is None:
        return f"{one.arg}{kind}"
    return f"{one.arg}{kind} = {ast.unparse(default)}" if kind else f"{one.arg}={ast.unparse(default)}"


def _fields(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """Annotated attributes, each with the docstring or the comment behind it where there is one."""
    rows = []
    for statement, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        about = lines[(statement.end_lineno or 1) - 1].partition("  # ")[2].partition("noqa")[0]
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            about = " ".join(after.value.value.split())
        kind = ast.unparse(statement.annotation).replace("|", "\\|")
        if not statement.target.id.startswith("_"):
            rows.append(f"| `{statement.target.id}` | `{kind}` | {about} |")
    return rows


def _prose(node: ast.AST) -> str:
    return ast.get_docstring(node) or ""  # type: ignore[arg-type]


FILLED = {"<!-- commands -->": commands, "<!-- http -->": http, "<!-- python -->": python}


# What mkdocs calls.

_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
_ELSEWHERE = re.compile(r"https://(?:unpkg\.com|fonts\.[a-z.]+|cdn\.[a-z.]+|cdnjs\.[a-z.]+)/")


def on_config(config: Any) -> Any:
    """Leave out places of pages that are not written. A page without a place is a warning of mkdocs itself."""
    written = {path.name for path in Path(config.docs_dir).glob("*.md")}
    config.nav = _written(config.nav, written)
    return config


def _written(entry: Any, written: set[str]) -> Any:
    if isinstance(entry, list):
        return [part for part in (_written(one, written) for one in entry) if part]
    if isinstance(entry, dict):
        return {title: kept for title, part in entry.items() if (kept := _written(part, written))}
    return entry if entry in written else None


def on_files(files: Any, config: Any) -> Any:
    """Take files that pages link to outside `docs` into the site."""
    from mkdocs.structure.files import File

    wanted = {
        target
        for page in files.documentation_pages()
        for target in _OUTSIDE.findall(page.content_string)
        if (ROOT / target).is_file()
    }
    for target in sorted(wanted):
        if target.endswith(".md"):
            files.append(File.generated(config, target, content=_inwards((ROOT / target).read_text())))
        else:
            files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the reference, and point links to what `on_files` took in."""
    markdown = _OUTSIDE.sub(r"](\1", markdown)
    if page.file.src_uri == PAGE:
        for mark, make in FILLED.items():
            markdown = markdown.replace(mark, make())
    return markdown


def _inwards(markdown: str) -> str:
    """Links of a page of the repository's root, as they are in the site."""
    return re.sub(r"\]\(docs/", "](", markdown)


def on_post_build(config: Any) -> None:
    """Cut what the theme's scripts would fetch from elsewhere, which no page of ours needs."""
    for script in Path(config.site_dir).rglob("*.js"):
        text = script.read_text()
        if _ELSEWHERE.search(text):
            script.write_text(_ELSEWHERE.sub("about:blank#", text))
