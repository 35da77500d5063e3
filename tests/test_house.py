"""The house: packages import only those above them, none in a circle, no room is too big, and tests lie as packages do."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from paths import ROOT
from torch import Tensor, nn

import recorders  # noqa: F401
from reducers._torch import declared

# Each may import those above it. Imports that are deferred, and those for types alone, count as imports.
ORDER = {
    "reducers": [
        "errors",
        "_torch",
        "state",
        "kernels",
        "core",
        "statistics",
        "distributions",
        "multivariate",
        "samples",
        "temporal",
        "combinators",
        "execution",
    ],
    "recorders": [
        "errors",
        "_torch",
        "recordings",
        "ring",
        "capture",
        "graphs",
        "schedule",
        "monitors",
        "recorder",
        "streams",
        "watch",
        "integrations",
        "",
        "cli",
    ],
}

TESTS = ROOT / "tests"
SPANNING = {
    "test_capture_table.py",
    "test_cookbook.py",
    "test_cuda.py",
    "test_docs.py",
    "test_docs_reducers.py",
    "test_examples.py",
    "test_golden.py",
    "test_gpu_benchmark.py",
    "test_house.py",
    "test_interpreted_lives.py",
    "test_lives.py",
    "test_memory.py",
    "test_notebooks.py",
    "test_plain_pytorch.py",
    "test_project.py",
    "test_real_networks.py",
    "test_site.py",
}
"""Files at the top of tests/: what they test is both packages, the documents, or PyTorch itself."""


def modules(package: str) -> dict[str, Path]:
    return {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in (ROOT / package).rglob("*.py")}


def imported(path: Path, known: set[str]) -> Iterator[str]:
    """The modules of the packages that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name in known else node.module for name in found]
        else:
            continue
        for name in found:
            if f"{name}.__init__" in known:
                yield f"{name}.__init__"
            elif name in known:
                yield name


@cache
def graph() -> dict[str, set[str]]:
    files = {**modules("reducers"), **modules("recorders")}
    return {name: set(imported(path, set(files))) - {name} for name, path in files.items()}


def room(name: str) -> str:
    """The entry of its package's list that a module belongs to; "" for the package itself, which re-exports from all."""
    part = name.split(".")[1]
    return "" if part == "__init__" else part


@pytest.mark.parametrize("package", ORDER)
def test_packages_import_only_those_above_them(package: str) -> None:
    order = ORDER[package]
    found = {name: others for name, others in graph().items() if name.startswith(f"{package}.")}
    assert {room(name) for name in found} | {""} == set(order) | {""}
    wrong = [
        f"{name} imports {other}"
        for name, others in found.items()
        for other in others
        if room(name) and other.startswith(f"{package}.")
        if room(other) not in order or order.index(room(other)) > order.index(room(name))
    ]
    assert wrong == []


def test_reducers_know_nothing_of_recorders() -> None:
    assert [
        name for name, others in graph().items() if name.startswith("reducers.") for o in others if o.startswith("recorders.")
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("package", ORDER)
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    left = {name: {other for other in others if other.startswith(package)} for name, others in graph().items()}
    left = {name: others for name, others in left.items() if name.startswith(package)}
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []


@pytest.mark.parametrize("package", ORDER)
def test_a_package_has_at_most_fourteen_entries_and_a_room_at_most_600_lines(package: str) -> None:
    entries = [entry.name for entry in (ROOT / package).iterdir() if entry.name not in ("__pycache__", "py.typed")]
    assert len(entries) <= 14
    assert {name: lines for name, path in modules(package).items() if (lines := len(path.read_text().splitlines())) > 600} == {}


def test_every_warning_points_at_the_line_of_the_user() -> None:
    files = [path for package in ORDER for path in modules(package).values() if "warnings.warn(" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in files] == [], "call reducers.errors.warn_user"


@pytest.mark.slow
def test_what_users_need_is_in_the_package() -> None:
    script = """
import sys, recorders, recorders.errors
found = {'rich', 'matplotlib', 'sklearn'} & set(sys.modules)
assert not found, found
missing = [name for name in (*recorders.errors.__all__, 'findings', 'overview', 'lenses', 'visualizers')
           if name not in recorders.__all__ or not hasattr(recorders, name)]
assert not missing, missing
recorders.lenses.OutputGradientGeometry, recorders.visualizers.TextVisualizer
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)


SUBSTITUTES = ("recorders._torch.__init__", "recorders._torch.compiler", "reducers._torch")
"""The files that reach private APIs of PyTorch: by `reach`, which needs an entry in the table, and says what is off without it."""

OTHERS = {
    # Python's own
    "_fields": "named tuples have it, by their documentation",
    "_make": "named tuples have it, by their documentation",
    "_getframe": "sys._getframe is documented",
    "_is_owned": "of a lock of threading: what threading itself calls in a forked process",
    "_at_fork_reinit": "of a lock of threading: what threading and logging call in a forked process",
    "_Hash": "the type of the objects that hashlib returns, in an annotation only",
    # where wrappers keep the module that they wrap, which names in state dicts show; another one would stay in those of results
    "_orig_mod": "of torch.compile",
    "_checkpoint_wrapped_module": "of activation checkpointing",
    "_fsdp_wrapped_module": "of FSDP",
    "_forward_module": "of Fabric",
    # of Keras: its public properties tell of a layer and all in it, not of the layer alone
    "_trainable_variables": "of a layer itself; tests/recorders/integrations/test_keras.py fails without it",
    "_non_trainable_variables": "of a layer itself; the same",
    "_torch_params": "where a layer has them for PyTorch; the same",
    # of PyTorch, in each version, and in models that were pickled by each
    "_parameters": "what nn.Module keeps its own parameters in, None too; state_dict, copies and saved models rely on it",
    "_modules": "what nn.Module keeps its own modules in, None too; state_dict, copies and saved models rely on it",
    "_buffers": "what nn.Module keeps its own buffers in; state_dict, copies and saved models rely on it",
    "_version": "the counter of changes in place, which autograd's documentation and its errors name",
    "_apply": "nn.Module calls it for `to`, `cuda` and `half`: Cell overrides it, as RNNs do",
    "_save_to_state_dict": "nn.Module calls it for `state_dict`: Cell overrides it, as its documentation tells modules to",
}
"""Names with an underscore that are not ours, and why they may be used anywhere."""

INSIDE = {
    "_forward_hooks": "what nn.Module keeps hooks in; a module without it counts as one without hooks",
    "_forward_pre_hooks": "what nn.Module keeps hooks in; a module without it counts as one without hooks",
    "_backward_hooks": "what nn.Module keeps hooks in; without it, a copy that findings runs calls those of the user once",
    "_backward_pre_hooks": "the same",
    "_post_accumulate_grad_hooks": "what a parameter keeps hooks in; without it, one that was swapped is not hooked anew",
    "_cdata": "the address of what is swapped; the same",
    "_optimizer_step_pre_hooks": "what an optimizer keeps its own hooks in; one without it counts as one that has some",
    "_distribute_module_applied": "what styles of tensor parallelism mark a module with; without the mark none is unclear",
    "_compiled_call_impl": "what module.compile() sets; without it, bisect runs what such a module compiled in eager mode only",
    "_timeout": "an attribute of the options of a backend; if it is gone, an error tells one thing less",
    "_dynamo_marked_constant": "what torch.compiler.assume_constant_result sets; that is called, too, once Dynamo is imported",
    "torch._dynamo": "the package of the compiler; if its name changes, hooks tell it what it must know when they are traced",
    "_ZN5torch8autograd25get_current_graph_task_idEv": "a function in C++; if it is not found, the slow operator asks in Python",
}
"""Names that only files in `SUBSTITUTES` use without `reach`, because they are attributes of objects, and what they do without."""

CODE = {
    "recorders.capture.calls": "finds the frame of its own Hook",
    "recorders.capture.copying": "makes functions again, with other values than those of a net that was copied",
    "recorders._torch.__init__": "asks which function calls modules, and which calls steps: both by `or_else`",
    "recorders._torch.compiler": "tells Dynamo which functions of this package to leave alone",
}
"""Files that look at the code of functions."""
OF_CODE = {
    "__code__",
    "co_consts",
    "co_names",
    "__closure__",
    "__globals__",
    "__defaults__",
    "__kwdefaults__",
    "__func__",
    "__self__",
}

LOOKALIKES = {
    "BackwardCFunction",
    "DeviceContext",
    "FakeTensor",
    "callback_handler",
    "current_tracer",
    "error_on_new_guards",
    "found_inf",
    "guard_manager",
    "hooks_dict_ref",
    "one_graph",
    "profile_hook_step",
    "queue_callback",
    "shape_env",
    "start_callbacks",
    "symbolic_locals",
    "tag_activation_checkpoint",
}
"""What PyTorch does not document, though it has no underscore."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """The names that the packages give: of functions, classes, variables, and attributes of their own objects."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") in ("self", "cls")
        ):
            found.add(node.attr)
        elif isinstance(node, ast.Assign) and any(getattr(target, "id", "") == "__slots__" for target in node.targets):
            found |= {value.value for value in ast.walk(node.value) if isinstance(value, ast.Constant)}
    return found


def of_pytorch() -> set[str]:
    """The names of what PyTorch gives its own modules, tensors, optimizers and handles of hooks."""
    kinds = (nn.Module, Tensor, torch.optim.Optimizer, torch.utils.hooks.RemovableHandle)
    return {name for kind in kinds for name in dir(kind)} | set(vars(nn.Module()))


def uses(tree: ast.Module, ours: set[str], theirs: set[str]) -> Iterator[str]:
    """What a file uses that PyTorch, or Python, does not promise to keep: attributes, imports, and names in strings."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.ClassDef)) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            foreign = is_private(node.attr) and (node.attr not in ours or node.attr in theirs)
            if foreign or node.attr in LOOKALIKES or node.attr in ("__code__", "__closure__", "co_consts", "co_varnames"):
                yield node.attr
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            names = names if isinstance(node, ast.Import) else [f"{node.module}.{name}" for name in names]
            yield from (name for name in names if name.startswith("torch.") and any(map(is_private, name.split("."))))
            yield from (name for name in names if name.startswith("torch.") and name.rpartition(".")[2] in LOOKALIKES)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            parts = node.value.split(".")
            foreign = any(is_private(part) and part not in ours - theirs for part in parts) or parts[-1] in LOOKALIKES
            if foreign and all(map(str.isidentifier, parts)) and (len(parts) == 1 or parts[0] == "torch"):
                yield node.value


@cache
def ours_and_theirs() -> tuple[set[str], set[str]]:
    return own_names(ast.parse(path.read_text()) for package in ORDER for path in modules(package).values()), of_pytorch()


@cache
def scanned() -> dict[str, list[str]]:
    files = {name: path for package in ORDER for name, path in modules(package).items()}
    return {name: list(uses(ast.parse(path.read_text()), *ours_and_theirs())) for name, path in files.items()}


def test_private_apis_of_pytorch_are_reached_in_one_place_of_each_package() -> None:
    found = {}
    for name, used in scanned().items():
        wrong = set(used) - OTHERS.keys() - (OF_CODE if name in CODE else set())
        if name in (*SUBSTITUTES, "recorders._torch.needs"):
            wrong -= INSIDE.keys() | LOOKALIKES | declared().keys()
        found |= {name: wrong} if wrong else {}
    assert found == {}, "reach it in _torch, and say in its table what is off without it"


def test_every_private_api_that_is_reached_is_in_the_table_and_no_other() -> None:
    reached = {"torch.utils.hooks.RemovableHandle.hooks_dict_ref"}  # an attribute that each handle has: the object is asked
    for name in SUBSTITUTES:
        tree = ast.parse((ROOT / f"{name.replace('.', '/')}.py").read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "declare"]
        table = {id(node) for call in calls for node in ast.walk(call)}
        texts = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in table]
        reached |= {node.value for node in texts if isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value)}
    assert reached - INSIDE.keys() == set(declared())


def test_names_that_are_allowed_are_used() -> None:
    used = {name for names in scanned().values() for name in names}
    assert (OTHERS.keys() | INSIDE.keys()) - used == set()


@pytest.mark.parametrize(
    "line",
    [
        "x = torch._C._anything",
        "from torch._dynamo import anything",
        "import torch._inductor.exc",
        "getattr(module, '_backward_hooks')",
        "importlib.import_module('torch._dynamo')",
        "handle.hooks_dict_ref()",
        "function.__code__.co_consts",
        "node._input_metadata",
        "from torch.autograd.function import BackwardCFunction",
        "vars(optimizer).get('found_inf')",
        "torch.ops.higher_order.tag_activation_checkpoint",
        "shape_env.error_on_new_guards()",
        "torch._foreach_add_(a, b)",
    ],
)
def test_a_planted_private_api_is_found(line: str) -> None:
    assert set(uses(ast.parse(line), *ours_and_theirs())) - OTHERS.keys()


def test_memory_of_tensors_is_taken_in_one_file_and_by_operators_of_graphs() -> None:
    """Whoever reads or writes at the address of a tensor asks first whether there is memory: `stored.address` does.

    What a graph hands over has memory.
    """
    taken = re.compile(r"data_ptr|from_address|untyped_storage|\._?storage\(")
    found = [name for name, path in modules("recorders").items() if taken.search(path.read_text())]
    # Handles are found by their address, at which nothing reads.
    assert sorted(found) == [
        *(f"recorders.graphs.{name}" for name in ("device", "reading", "ring")),
        "recorders.recordings.storage.tensors",
    ]


def test_every_test_file_lies_in_the_folder_of_what_it_tests() -> None:
    packages = {path.parent.relative_to(ROOT) for package in ORDER for path in (ROOT / package).rglob("__init__.py")}
    found = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert {path.name for path in found if path.parent == Path()} == SPANNING
    assert {path.parent for path in found} - packages == {Path(), Path("faults"), Path("parity")}


def test_names_of_tests_have_fewer_than_80_characters() -> None:
    defined = re.compile(r"^ *def (test_\w+)", re.MULTILINE)
    functions = [name for path in TESTS.rglob("*.py") for name in defined.findall(path.read_text())]
    assert len(functions) > 500
    assert [name for name in functions if len(name) >= 80] == []


def test_no_two_test_files_have_one_name() -> None:
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted({name for name in names if names.count(name) > 1}) == []  # pytest cannot import both in one process


NAMED_BY_ITS_LIBRARY = {"RecorderCallback"}
"""Classes of which there are several, because each library that calls them has its own."""


def test_no_two_classes_have_one_name() -> None:
    found: dict[str, list[str]] = {}
    for package in ORDER:
        for name, path in modules(package).items():
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    found.setdefault(node.name, []).append(name)
    assert {name: files for name, files in found.items() if len(files) > 1 and name not in NAMED_BY_ITS_LIBRARY} == {}


def test_no_docstring_begins_with_what_another_one_says() -> None:
    """Whoever meets a function first has not read the one before it."""
    begins = re.compile(r'"""(The same|Does the same)\b')
    assert [f"{path.name}: {line.strip()}" for line, path in lines_of_all() if begins.search(line)] == []


def lines_of_all() -> Iterator[tuple[str, Path]]:
    for package in ORDER:
        for path in modules(package).values():
            for line in path.read_text().splitlines():
                yield line, path
