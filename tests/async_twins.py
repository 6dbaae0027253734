"""Writes the modules with the asynchronous twins, from the methods of the public classes.

`python -m tests.async_twins` writes them, and `tests/unit/test_async_twins.py` compares them with
the methods as they are now.
"""

from __future__ import annotations

import ast
import keyword
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "delaytasks"
COMMAND = "python -m tests.async_twins"
#: The public methods without a generated twin, each with the reason.
WITHOUT_TWIN = {
    "new_id": "waits for nothing",
    "shard_for": "waits for nothing",
    "processor": "registers a function",
    "using": "is a context manager that waits for nothing",
    "wait": "would occupy a thread while it waits, so `await_` is written by hand",
    "runner": "runs tasks in the calling thread, for tests and scripts",
    "create_tables": "runs on a connection of the caller, whose run_sync() takes it",
    "close": "closes the threads of the twins, so `aclose` is written by hand",
}
#: Twins that `client.py` defines itself.
WRITTEN_BY_HAND = ["aclose", "await_"]


class TwinClass(NamedTuple):
    """A class with twins: the module and the class of the methods, and the class of the twins."""

    source: str
    methods_class: str
    twins_class: str


#: By the name of the generated module.
CLASSES = {
    "async_twins": TwinClass("client", "DelayTasks", "AsyncTwins"),
    "recurrence/async_twins": TwinClass("recurrence/api", "Recurring", "AsyncRecurringTwins"),
    "statistics/async_twins": TwinClass("statistics/api", "Statistics", "AsyncStatisticsTwins"),
}
_CLASS = '''"""The asynchronous twins of the methods of `{methods_class}`.

{command} writes this module from `delaytasks/{source}.py`.
"""

{imports}

class {twins_class}:
    """For coroutines: each method has the parameters, the result and the errors of its twin."""

    if TYPE_CHECKING:

        async def _call_async(self, name: str, /, *arguments: Any, **options: Any) -> Any: ...
{iterating}
{methods}
'''
_ITERATING = """
        def _iterate_async(
            self, name: str, /, *arguments: Any, **options: Any
        ) -> AsyncIterator[Any]: ...
"""
_FUNCTIONS = '''"""The asynchronous twins of the module-level functions.

{command} writes this module from `delaytasks/api.py`.
"""

from __future__ import annotations

from delaytasks.api import methods

{lines}

__all__ = {names}
'''


def twin_name(name: str) -> str:
    """Return the name of a method's twin: `afind`, and `await_` for `wait`, since `await` is a
    keyword."""
    return f"a{name}_" if keyword.iskeyword(f"a{name}") else f"a{name}"


def modules() -> dict[str, str]:
    """Return the texts of the generated modules, by name. They are not formatted."""
    found = {name: _class_module(twin_class) for name, twin_class in CLASSES.items()}
    client = ast.parse((PACKAGE / "client.py").read_text())
    twins = {twin_name(method.name) for method in _methods(client, "DelayTasks")}
    exported = _exported(ast.parse((PACKAGE / "api.py").read_text()))
    names = sorted({*twins, *WRITTEN_BY_HAND}.intersection(map(twin_name, exported)))
    found["async_api"] = _FUNCTIONS.format(
        command=f"`{COMMAND}`",
        lines="\n".join(f"{name} = methods.{name}" for name in names),
        names=repr(names),
    )
    return found


def _class_module(twin_class: TwinClass) -> str:
    """Return the text of a module with the twins of a class."""
    source = ast.parse((PACKAGE / f"{twin_class.source}.py").read_text())
    bodies = "\n".join(_twin(method) for method in _methods(source, twin_class.methods_class))
    return _CLASS.format(
        **twin_class._asdict(),
        command=f"`{COMMAND}`",
        imports=_imports(source, bodies),
        iterating=_ITERATING if "_iterate_async" in bodies else "",
        methods=_indented(bodies),
    )


def _methods(source: ast.Module, name: str) -> Iterator[ast.FunctionDef]:
    """Yield the methods of a class that have a twin, overloads included."""
    (found,) = (node for node in source.body if getattr(node, "name", "") == name)
    assert isinstance(found, ast.ClassDef)
    for node in found.body:
        if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
            continue
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        if decorators <= {"overload"} and node.name not in WITHOUT_TWIN:
            yield node


def _twin(method: ast.FunctionDef) -> str:
    """Return the source of a method's twin."""
    assert method.returns is not None, method.name
    result, name, is_overload = ast.unparse(method.returns), method.name, method.decorator_list
    is_iterator = result.startswith("Iterator[")
    head = f"def {twin_name(name)}({ast.unparse(method.args)}) -> "
    head += f"Async{result}:" if is_iterator else f"{result}:"
    if is_overload:
        return f"@overload\nasync {head} ...\n"
    summary = (ast.get_docstring(method) or "").partition("\n\n")[0]
    documentation = f'    """{summary}\n\n    This is the asynchronous twin of `{name}`.\n    """\n'
    call = ", ".join([repr(name), *_arguments(method.args)])
    if is_iterator:
        return f"{head}\n{documentation}    return self._iterate_async({call})\n"
    if result == "None":
        return f"async {head}\n{documentation}    await self._call_async({call})\n"
    call = f"    result: {result} = await self._call_async({call})\n    return result\n"
    return f"async {head}\n{documentation}{call}"


def _arguments(parameters: ast.arguments) -> Iterator[str]:
    """Yield the arguments that pass on the parameters."""
    for parameter in [*parameters.posonlyargs, *parameters.args][1:]:
        yield parameter.arg
    if parameters.vararg is not None:
        yield f"*{parameters.vararg.arg}"
    for parameter in parameters.kwonlyargs:
        yield f"{parameter.arg}={parameter.arg}"
    if parameters.kwarg is not None:
        yield f"**{parameters.kwarg.arg}"


def _imports(source: ast.Module, bodies: str) -> str:
    """Return the imports of a module that the twins need, at runtime only for defaults."""
    functions = [node for node in ast.walk(ast.parse(bodies)) if hasattr(node, "args")]
    defaults = {
        name.id
        for function in functions
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
        for default in [*function.args.defaults, *function.args.kw_defaults]
        if default is not None
        for name in ast.walk(default)
        if isinstance(name, ast.Name)
    }
    used = {node.id for node in ast.walk(ast.parse(bodies)) if isinstance(node, ast.Name)}
    typing = sorted({"TYPE_CHECKING", "Any"} | ({"overload"} & used))
    at_runtime, for_types = {"typing": typing}, dict[str, list[str]]()
    if "_iterate_async" in bodies:
        for_types["collections.abc"] = ["AsyncIterator"]
    for node in ast.walk(source):
        if not isinstance(node, ast.ImportFrom) or node.module in ("__future__", "typing"):
            continue
        for names, imports in ((defaults, at_runtime), (used - defaults, for_types)):
            taken = {alias.name for alias in node.names} & names
            if taken:
                known = imports.get(str(node.module), [])
                imports[str(node.module)] = [*taken.union(known)]
    return "\n".join(
        ["from __future__ import annotations", "", *_sorted(at_runtime), "", "if TYPE_CHECKING:"]
        + [f"    {line}" for line in _sorted(for_types)]
    )


def _sorted(imports: dict[str, list[str]]) -> list[str]:
    """Return the import statements in the order of ruff."""

    def place(module: str) -> tuple[bool, bool, str]:
        package = module.partition(".")[0]
        return package == "delaytasks", package not in sys.stdlib_module_names, module

    def rank(name: str) -> tuple[bool, bool, str]:
        return not name.isupper(), name[0].islower(), name

    return [
        f"from {module} import {', '.join(sorted(imports[module], key=rank))}"
        for module in sorted(imports, key=place)
    ]


def _exported(module: ast.Module) -> list[str]:
    """Return `__all__` of a module."""
    (names,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    exported: list[str] = ast.literal_eval(names)
    return exported


def _indented(source: str) -> str:
    return "".join(f"    {line}" if line.strip() else line for line in source.splitlines(True))


def write() -> None:
    """Write the modules, formatted by ruff."""
    for name, text in modules().items():
        path = PACKAGE / f"{name}.py"
        path.write_text(text)
        for command in (["check", "--quiet", "--fix-only", "--select", "I"], ["format", "--quiet"]):
            subprocess.run([sys.executable, "-m", "ruff", *command, str(path)], check=True)


if __name__ == "__main__":
    write()
