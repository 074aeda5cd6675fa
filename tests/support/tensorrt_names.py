"""Every TensorRT name, argument and enum in a file of ours, held against what TensorRT 11.4 has.

The file is read, not run: no machine here has the library. Types follow assignments: what the
facts say a method gives is what the variable is. What has no type and is called by a name that
TensorRT uses is a problem as well, so nothing is skipped in silence.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

FACTS: Final = json.loads(
    (Path(__file__).parent.parent / "data" / "tensorrt_11_4.json").read_text(encoding="utf-8")
)

#: How our files call the module itself.
_MODULE: Final = ("trt", "self._trt", "self._gpu.trt", "gpu.trt")

#: What a variable is that nothing is assigned to: parameters, and the objects that a class keeps.
GIVEN: Final = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "config": "IBuilderConfig",
    "error": "ParserError",
    "context": "IExecutionContext",
    "engine": "ICudaEngine",
    "self._engine": "ICudaEngine",
    "self._runtime": "Runtime",
}

#: Functions of a class that TensorRT calls, by the class that ours derives from.
_DERIVED: Final = ("ILogger", "IErrorRecorder", "IProgressMonitor")


def problems(source: str) -> list[str]:
    """Return what in ``source`` TensorRT 11.4 does not have, one line each."""
    tree = ast.parse(source)
    types = _types(tree)
    found = [*_enums(tree), *_members(tree, types), *_derived(tree)]
    return sorted(set(found))


def checked(source: str) -> set[str]:
    """Return the names of TensorRT's that a file uses: what `problems` has looked at."""
    tree = ast.parse(source)
    types = _types(tree)
    return {
        f"{types[ast.unparse(node.value)]}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in types
    } | {ast.unparse(node) for node in ast.walk(tree) if _is_of_module(node)}


def _types(tree: ast.AST) -> dict[str, str]:
    """Return the class of each expression that has one of TensorRT's."""
    types = dict(GIVEN)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if kind := _given_by(node.value, types):
            types[ast.unparse(node.targets[0])] = kind
    return types


def _given_by(call: ast.Call, types: Mapping[str, str]) -> str:
    """Return the class of what ``call`` gives, if it is one of TensorRT's."""
    function = call.func
    if not isinstance(function, ast.Attribute):
        return ""
    owner = ast.unparse(function.value)
    if owner in _MODULE:
        return function.attr if function.attr in FACTS["classes"] else ""
    overloads = _methods(types.get(owner, "")).get(function.attr, [])
    kinds = {overload["gives"].rpartition("::")[2] for overload in overloads}
    # nvonnxparser's errors have one more name.
    kinds = {"ParserError" if kind == "IParserError" else kind for kind in kinds}
    return next((kind for kind in kinds if kind in FACTS["classes"]), "")


def _methods(kind: str) -> Mapping[str, Any]:
    methods: Mapping[str, Any] = FACTS["classes"].get(kind, {}).get("methods", {})
    return methods


def _is_of_module(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node.value) in _MODULE


def _enums(tree: ast.AST) -> Iterator[str]:
    """Yield classes and enum members of the module that it does not have."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if _is_of_module(node) and node.attr != "__version__":
            if node.attr not in FACTS["classes"] and node.attr not in FACTS["enums"]:
                yield f"line {node.lineno}: tensorrt has no {node.attr}"
        elif _is_of_module(node.value):
            assert isinstance(node.value, ast.Attribute)
            members = FACTS["enums"].get(node.value.attr) or [
                *FACTS["classes"].get(node.value.attr, {}).get("attributes", []),
                "__init__",
            ]
            if node.attr not in members:
                yield f"line {node.lineno}: {node.value.attr} has no {node.attr}"
        elif isinstance(node.value, ast.Attribute) and _is_of_module(node.value.value):
            # Members of a nested enum are exported into its class.
            assert isinstance(node.value.value, ast.Attribute)
            owner = node.value.value.attr
            if node.attr not in FACTS["classes"].get(owner, {}).get("attributes", []):
                yield f"line {node.lineno}: {owner}.{node.value.attr} has no {node.attr}"


def _members(tree: ast.AST, types: Mapping[str, str]) -> Iterator[str]:
    """Yield attributes that a class does not have, and calls that no overload of it takes."""
    known = {name for kind in FACTS["classes"] for name in _methods(kind)} - _COMMON
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in types:
            kind = types[ast.unparse(node.value)]
            facts = FACTS["classes"][kind]
            if node.attr not in facts["methods"] and node.attr not in facts["attributes"]:
                yield f"line {node.lineno}: {kind} has no {node.attr}"
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        kind, name = types.get(ast.unparse(node.func.value), ""), node.func.attr
        if not kind and name in known and not _is_ours(node.func.value):
            yield f"line {node.lineno}: the class of {ast.unparse(node.func.value)} is not known"
        overloads = _methods(kind).get(name, [])
        if overloads and not any(_takes(overload["takes"], node) for overload in overloads):
            yield f"line {node.lineno}: {kind}.{name} does not take {ast.unparse(node)}"


#: Methods of TensorRT's that other things have as well.
_COMMON: Final = frozenset({"clear", "reset", "update", "parse", "query", "log", "combine"})


def _is_ours(owner: ast.expr) -> bool:
    """Return whether a call is of one of our own objects, or of a base class in ``__init__``."""
    return ast.unparse(owner) in ("self", "store")


def _takes(parameters: list[str], call: ast.Call) -> bool:
    names = [name.rstrip("?") for name in parameters]
    least = sum(not name.endswith("?") for name in parameters)
    given = len(call.args) + len(call.keywords)
    named = all(keyword.arg in names[len(call.args) :] for keyword in call.keywords)
    return least <= given <= len(names) and named


def _derived(tree: ast.AST) -> Iterator[str]:
    """Yield functions of a derived class that TensorRT would not call, or call otherwise."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.ClassDef):
            continue
        for base in node.bases:
            kind = base.attr if isinstance(base, ast.Attribute) else ""
            if kind not in _DERIVED:
                continue
            methods = _methods(kind)
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            for function in functions:
                given = len(function.args.args) - 1
                overloads = methods.get(function.name, [])
                if function.name.startswith("__"):
                    continue
                if not overloads:
                    yield f"line {function.lineno}: {kind} has no {function.name}"
                elif all(len(overload["takes"]) != given for overload in overloads):
                    yield f"line {function.lineno}: {kind}.{function.name} is called otherwise"
            if missing := methods.keys() - {function.name for function in functions}:
                yield f"line {node.lineno}: {kind} needs {', '.join(sorted(missing))}"
