"""The rules of the house, read from the source text: nothing here imports what it checks.

A rule takes one file and returns its problems. To allow something, change the lists at the top.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import TypeAlias

# Plain data in, plain data out: these are tested without a process group, and without torch.
PURE = {
    "consensus/errors.py",
    "consensus/vote.py",
    "consensus/enclosure.py",
    "consensus/placement.py",
    "consensus/_hops.py",
    "consensus/_planning.py",
    "consensus/_protocol.py",
    "consensus/_records.py",
    "consensus/_text.py",
    "consensus/_tours.py",
    "consensus/_trace.py",
    "consensus/_wire.py",
    "adapters/_plan.py",
    "adapters/_owners.py",
    "adapters/_parcels.py",
}

# Where a collective may stand. Elsewhere it would be one that no agreement knows of.
MAY_COMMUNICATE = (
    "consensus/_transport.py",
    "consensus/_sockets.py",
    "adapters/_reshard.py",
    "adapters/_transports.py",
    "consensus/testing/*",
    "consensus/demo*",
    "consensus/check*",
)
MAY_PRINT = ("*/__main__.py", "consensus/demo*", "consensus/check*")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
# "path" or "path::function" -> why it may be longer.
LONGER: dict[str, str] = {
    "adapters/hybrid.py::__init__": "its 33 arguments, most of which it only hands to one half",
}

# torch's names that mean a collective on whatever object they are called.
COLLECTIVE = re.compile(
    r"_?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)"
    r"(_into)?(_tensor|_single|_object|_base|_sparse)?(_coalesced)?"
    r"|(monitored_)?barrier|broadcast(_object_list)?|gather_object|scatter_object_list"
    r"|batch_isend_irecv|isend|irecv|full_tensor|redistribute|init_process_group"
)
# Names that mean one only in torch.distributed: tensors gather, and generators are sent to.
COLLECTIVE_IN_TORCH = re.compile(
    COLLECTIVE.pattern + r"|(all|reduce)_?(reduce|gather|scatter|to_?all)\w*|broadcast\w*"
    r"|(send|recv)(_object_list)?|reduce|gather|scatter"
    r"|permute_tensor|distribute_tensor|init_device_mesh"
)
# They name the group by a counter of this rank alone, which differs under overlapping groups.
GROUP_MAKER = re.compile(r"_?new_group\w*|new_subgroups\w*|(split|shrink|merge_remote)_group")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Source:
    """One file: where it stands, what it says, and what its imported names stand for."""

    path: str  # from the checkout, with forward slashes
    text: str
    tree: ast.Module
    names: Mapping[str, str]  # "dist" -> "torch.distributed"

    def at(self, node: ast.AST | int, what: str) -> str:
        line = node if isinstance(node, int) else getattr(node, "lineno", 0)
        return f"{self.path}:{line}: {what}"

    def matches(self, patterns: Iterable[str]) -> bool:
        return any(fnmatch(self.path, pattern) for pattern in patterns)

    @property
    def in_library(self) -> bool:
        return self.matches(("consensus/*", "adapters/*"))

    @property
    def in_tests(self) -> bool:
        return self.matches(("tests/*",))


Rule: TypeAlias = Callable[[Source], list[str]]


def parse(path: str, text: str) -> Source:
    tree = ast.parse(text, path)
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                names[alias.asname or head] = alias.name if alias.asname else head
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{origin(node, path)}.{alias.name}"
    return Source(path, text, tree, names)


def origin(node: ast.ImportFrom, path: str) -> str:
    """The absolute name of the module that a ``from`` import reads."""
    if node.level == 0:
        return node.module or ""
    package = PurePosixPath(path).parent.parts
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, *([node.module] if node.module else [])])


def imports(source: Source) -> Iterator[tuple[ast.stmt, str, str]]:
    """Each import as (statement, module, module with the imported name)."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = origin(node, source.path)
            yield from ((node, module, f"{module}.{alias.name}") for alias in node.names)


def resolve(node: ast.expr, names: Mapping[str, str]) -> str | None:
    """The absolute name an expression such as ``dist.all_reduce`` stands for, if it is imported."""
    attributes: list[str] = []
    while isinstance(node, ast.Attribute):
        attributes.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(attributes)])


def is_under(name: str, *modules: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def consensus_knows_no_optimizer(source: Source) -> list[str]:
    if not source.matches(("consensus/*",)):
        return []
    return [
        source.at(node, "consensus imports adapters")
        for node, module, _ in imports(source)
        if is_under(module, "adapters")
    ]


def pure_modules_import_no_torch(source: Source) -> list[str]:
    if source.path not in PURE:
        return []
    pure = {path.removesuffix(".py").replace("/", ".") for path in PURE}
    problems = []
    for node, module, name in imports(source):
        ours = is_under(module, "consensus", "adapters")
        if is_under(module, "torch") or (ours and not {module, name} & pure):
            problems.append(source.at(node, f"a pure module imports {name}, which is not pure"))
    return problems


def only_named_modules_communicate(source: Source) -> list[str]:
    if not source.in_library or source.matches(MAY_COMMUNICATE):
        return []
    problems = []
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = resolve(node, source.names) or ""
            in_torch = is_under(name, "torch.distributed", "torch.ops")
            if in_torch and COLLECTIVE_IN_TORCH.fullmatch(name.rpartition(".")[2]):
                problems.append(source.at(node, f"{name} communicates"))
        elif isinstance(node, ast.Call) and is_collective_method(node, source.names):
            problems.append(source.at(node, f"{ast.unparse(node.func)}() communicates"))
    return problems


def is_collective_method(call: ast.Call, names: Mapping[str, str]) -> bool:
    """Whether this is a collective by its name, on an object whose origin we cannot see."""
    function = call.func
    if not isinstance(function, ast.Attribute) or resolve(function, names) is not None:
        return False
    if isinstance(function.value, ast.Name) and function.value.id in ("self", "cls"):
        return False
    # ProcessGroup.send takes tensors, rank and tag; a generator's or a pipe's takes one value.
    if function.attr in ("send", "recv"):
        return len(call.args) > 2
    return COLLECTIVE.fullmatch(function.attr) is not None


def no_group_by_counter(source: Source) -> list[str]:
    if source.in_tests:
        return []
    used = [(node, node.attr) for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
    imported = [(node, name.rpartition(".")[2]) for node, _, name in imports(source)]
    return [
        source.at(node, f"{name} makes a named group; build a private one")
        for node, name in [*used, *imported]
        if GROUP_MAKER.fullmatch(name)
    ]


def no_package_prints(source: Source) -> list[str]:
    if not source.in_library or source.matches(MAY_PRINT):
        return []
    return [
        source.at(node, "print in a package; use the module's logger")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def no_sleep_orders_events(source: Source) -> list[str]:
    """A sleep that orders events fails on a slow machine. One that *is* the fault says 'stall'."""
    if not source.in_tests:
        return []
    comments = comments_by_line(source.text)
    return [
        source.at(node, "time.sleep in a test, without a comment that calls it a stall")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Call)
        and resolve(node.func, source.names) == "time.sleep"
        and "stall" not in comment_beside(node.lineno, source.text.splitlines(), comments)
    ]


def comments_by_line(text: str) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def comment_beside(line: int, lines: list[str], comments: Mapping[int, str]) -> str:
    """The comment on this line and the whole-line comments directly above it."""
    found = [comments.get(line, "")]
    while (line := line - 1) in comments and lines[line - 1].lstrip().startswith("#"):
        found.append(comments[line])
    return " ".join(found)


def long_parts(source: Source) -> Iterator[tuple[str, str]]:
    """Each overlong file or function, as (its key in LONGER, the problem)."""
    lines = len(source.text.splitlines())
    if lines > MAX_FILE_LINES:
        yield source.path, source.at(1, f"{lines} lines in a file, {MAX_FILE_LINES} at most")
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                what = f"{lines} lines in {node.name}, {MAX_FUNCTION_LINES} at most"
                yield f"{source.path}::{node.name}", source.at(node, what)


def nothing_is_too_long(source: Source) -> list[str]:
    return [problem for key, problem in long_parts(source) if key not in LONGER]


def folders_without_init(paths: Iterable[str]) -> list[str]:
    """Folders that hold Python files but are no package: their workers cannot be imported."""
    files = {PurePosixPath(path) for path in paths}
    folders = {file.parent for file in files if file.suffix == ".py"}
    return sorted(str(folder) for folder in folders if folder / "__init__.py" not in files)


RULES: tuple[Rule, ...] = (
    consensus_knows_no_optimizer,
    pure_modules_import_no_torch,
    only_named_modules_communicate,
    no_group_by_counter,
    no_package_prints,
    no_sleep_orders_events,
    nothing_is_too_long,
)
