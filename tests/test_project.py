"""What belongs to the project and not to its code: one version, extras with code behind them, a quick subset, coverage."""

from __future__ import annotations

import ast
import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NamedTuple

import no_skips
import pytest
from paths import ROOT

import recorders
import reducers

TOOLS = {"demo", "test", "bench", "docs", "all", "parity", "gpu-tests", "trackers", "calibration-tests", "trainers-tests"}
TOOLS |= {"llm-compressor-tests", "sae-lens-tests", "browser-tests", "unsloth-tests"}
"""Extras that bring whole environments. Every other extra is one that code asks for by `require(module, extra)`."""
ALONE = {"axolotl", "mlflow", "trackio"}
"""Extras that `all` leaves out: axolotl asks for a certain version of a hundred packages, the others bring a server each."""
EXAMPLES = {"dask"}
"""Or one that an example imports."""


IMPORTED_AS = {"nvidia-modelopt": "modelopt"}
"""Packages whose module has another name."""


class Environment(NamedTuple):
    """A row of the table in CONTRIBUTING.md, which `.ci/packages` makes and tests."""

    name: str
    extras: list[str]
    files: list[str]
    chosen: str | None  # what follows -k


def environments() -> list[Environment]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    lines = text.partition("<!-- environments -->\n")[2].partition("<!-- /environments -->")[0].splitlines()
    found = []
    for line in lines[2:]:
        name, wanted, tests = line.replace("`", "").strip("| ").split(" | ")
        words = shlex.split(tests)
        chosen = words[1] if words[0] == "-k" else None
        found.append(Environment(name, wanted.split(", "), words[2 if chosen else 0 :], chosen))
    return found


def modules_of(names: list[str]) -> set[str]:
    """The modules that extras bring, with those of the extras that they name."""
    found: set[str] = set()
    for requirement in "\n".join(extras()[name] for name in names).split("\n"):
        project, _, further = re.split(r"[>;]", requirement)[0].strip("] ").partition("[")
        if project == "torch-recorders":
            found |= modules_of(further.split(","))
        elif project:
            found.add(IMPORTED_AS.get(project, project.replace("-", "_")))
    return found


def setup() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def extras() -> dict[str, str]:
    return dict(setup()["options.extras_require"])


def pythons() -> list[str]:
    """The versions of Python that the package says it is for."""
    return re.findall(r"Programming Language :: Python :: (3\.\d+)\n", setup()["metadata"]["classifiers"] + "\n")


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    assert recorders.__version__ == reducers.__version__
    assert f"\nversion: {reducers.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert "\nversion = attr: reducers.__version__\n" in (ROOT / "setup.cfg").read_text()


def test_the_changelog_has_a_section_for_the_version_of_the_day_that_is_cited() -> None:
    sections = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    day = re.search(r"^date-released: (\d{4}-\d\d-\d\d)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert day is not None
    assert sections[:2] == ["[Unreleased]", f"[{reducers.__version__}] - {day[1]}"]


def test_every_extra_has_code_behind_it_and_nearly_all_are_in_all() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "recorders").rglob("*.py"))
    asked_for = set(re.findall(r'require\([^)]*"(\w+)"\)', code))
    asked_for |= extras().keys() & {*re.findall(r"^try:\n    from (\w+)", code, re.MULTILINE)}  # used if it is there
    for example in (ROOT / "examples").glob("*.py"):
        asked_for |= EXAMPLES & {line.split(".")[0].removeprefix("import ") for line in example.read_text().splitlines()}
    assert extras().keys() - TOOLS <= asked_for <= extras().keys()
    named = re.search(r"torch-recorders\[(.*)\]", extras()["all"])
    assert named is not None
    assert set(named[1].split(",")) == extras().keys() - (TOOLS - {"demo"}) - ALONE


def test_every_test_that_needs_a_package_of_an_environment_runs_in_one_that_has_it() -> None:
    rows = environments()
    assert {extra for row in rows for extra in row.extras} <= extras().keys()
    everywhere = modules_of(["test", "all", "parity", "docs", "gpu-tests"])  # which .ci/run installs
    brought = {row.name: modules_of(row.extras) - everywhere for row in rows}
    for path in (ROOT / "tests").rglob("test_*.py"):
        file, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        named = {word.partition(".")[0] for word in words} & set().union(*brought.values())
        there = [row for row in rows if file in row.files]
        missing = named - set().union(*(brought[row.name] for row in there))
        assert not missing or path == Path(__file__), f"{file} names {missing}: which environment of CONTRIBUTING.md runs it?"
        chosen = {row.chosen for row in there} - {None}  # of a file that several environments share: a word, and the rest
        tests = " ".join(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        plain = {word for some in chosen for word in some.replace("not ", "").split(" and ") if word in tests}
        assert plain == set() or chosen == plain | {" and ".join(f"not {word}" for word in sorted(plain))}


def test_the_workflow_runs_every_environment() -> None:
    workflow = (ROOT / ".github" / "workflows" / "weekly.yml").read_text()
    assert f"environment: [{', '.join(row.name for row in environments())}]\n" in workflow
    assert "run: bash .ci/packages ${{ matrix.environment }}\n" in workflow
    assert [file for row in environments() for file in row.files if not (ROOT / file).is_file()] == []


SKIPPING = """
import pytest

@pytest.mark.parametrize("reason", ["x is not installed", "needs a GPU", "needs a later torch", "this system has no fork"])
def test_skips(reason):
    pytest.skip(reason)

def test_torch():
    pytest.importorskip("torch_of_nobody")

@pytest.mark.skipif(True, reason="no chromium")
def test_marked():
    pass

@pytest.mark.xfail
def test_fails():
    raise AssertionError
"""
"""Skips with reasons, one of which names torch in vain."""


@pytest.mark.parametrize(
    ("strict", "whole", "told"),
    [
        ("0", "1", "6 skipped, 1 xfailed"),
        ("1", "1", "2 failed, 3 skipped, 1 xfailed, 1 error"),
        ("0", "pytest.importorskip('nothing_of_that_name')", "1 skipped"),
        ("1", "pytest.importorskip('nothing_of_that_name')", "1 error"),
    ],
)
def test_where_nothing_may_be_skipped_a_missing_package_is_a_failure(tmp_path: Path, strict: str, whole: str, told: str) -> None:
    (tmp_path / "conftest.py").write_text(f"from no_skips import {', '.join(no_skips.__all__)}\n")
    (tmp_path / "test_skipping.py").write_text(f"{SKIPPING}\n{whole}\n")
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "RECORDERS_NO_SKIPS": strict}
    command = [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, "-c", os.devnull, tmp_path]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    run = subprocess.run(command, env={**clean, **environment}, capture_output=True, text=True)
    assert re.search(rf"^{told} in ", run.stdout, re.MULTILINE), run.stdout
    assert ("which RECORDERS_NO_SKIPS=1 forbids: could not import" in run.stdout) == (strict == "1")


def test_these_tests_heed_it(request: pytest.FixtureRequest) -> None:
    for name in no_skips.__all__:
        assert getattr(no_skips, name) in {found.function for found in getattr(request.config.hook, name).get_hookimpls()}


@pytest.mark.parametrize(
    ("page", "subset"),
    [("README.md", "quick"), *((page, name) for page in ("CONTRIBUTING.md", ".ci/run") for name in ("quick", "interpreted"))],
)
def test_a_subset_is_named_and_its_files_exist(page: str, subset: str) -> None:
    assert f"@tests/{subset}.txt" in (ROOT / page).read_text()
    files = (ROOT / "tests" / f"{subset}.txt").read_text().split()
    assert files == sorted(set(files))
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_the_versions_of_python_are_the_same_wherever_they_are_written() -> None:
    minors = [int(version.partition(".")[2]) for version in pythons()]
    assert minors == list(range(minors[0], minors[-1] + 1))
    oldest = pythons()[0]
    assert setup()["options"]["python_requires"] == f">={oldest}"
    tools = (ROOT / "pyproject.toml").read_text()
    assert f'python_version = "{oldest}"' in tools
    assert f'target-version = "py{oldest.replace(".", "")}"' in tools
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert f"python: {json.dumps(pythons())}" in workflow
    assert f"CIBW_BUILD: cp{oldest.replace('.', '')}-manylinux_*" in workflow


def test_the_oldest_torch_is_the_same_wherever_it_is_written() -> None:
    needed = re.search(r"^torch>=(\S+)$", setup()["options"]["install_requires"], re.MULTILINE)
    assert needed is not None
    assert f'torch: ["torch=={needed[1]}.0", "torch"]' in (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert measured()[0]["torch"] == f"{needed[1]}.0"


def measured() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = json.loads((ROOT / "benchmarks" / "results" / "versions.json").read_text())["rows"]
    return rows


def test_each_python_and_the_ends_of_torch_were_tried() -> None:
    rows = measured()
    tried = {(row["python"].rpartition(".")[0], row["torch"]): row["outcome"] for row in rows}
    assert {python for python, _ in tried} == set(pythons())
    assert set(tried.values()) <= {"passed", "no wheel of torch"}
    for torch in (rows[0]["torch"], rows[-1]["torch"]):
        assert "passed" in {outcome for (_, other), outcome in tried.items() if other == torch}


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    jobs = (ROOT / ".github" / "workflows" / "release.yml").read_text().partition("\njobs:\n")[2]
    by_name = dict(re.findall(r"^  (\w+):\n(.*?)(?=^  \w|\Z)", jobs, re.MULTILINE | re.DOTALL))
    assert set(by_name) == {"source", "any", "loops", "smoke", "publish"}
    assert [name for name, job in by_name.items() if "id-token" in job or "gh-action-pypi-publish" in job] == ["publish"]
    assert "    if: github.ref_type == 'tag'\n    runs-on" in by_name["publish"]
    assert "    needs: [source, any, loops, smoke]\n" in by_name["publish"]


def test_the_paper_is_one_page_and_cites_what_it_lists() -> None:
    text = (ROOT / "docs" / "paper.md").read_text()
    prose = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text.split("---\n", 2)[2], flags=re.DOTALL)
    assert 750 < len(prose.split()) < 1000
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == [
        *("Summary", "Statement of need", "State of the field", "Software design", "Measured", "Limits", "References"),
    ]
    listed = re.findall(r"^@\w+\{(\w+),$", (ROOT / "docs" / "paper.bib").read_text(), re.MULTILINE)
    assert listed == sorted(set(listed))
    assert set(re.findall(r"(?<![\w.])@(\w+)", prose)) == set(listed)
    results = set(re.findall(r"`(\w+\.json)`", prose))
    assert results == {name for name in results if (ROOT / "benchmarks" / "results" / name).is_file()}


@pytest.mark.slow
def test_the_source_distribution_has_what_a_build_needs_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="70.1")
    shutil.copytree(ROOT, tmp_path / "tree", ignore=shutil.ignore_patterns(".*", "*.so", "__pycache__", "*.egg-info", "build"))
    shutil.copy(ROOT / "reducers/kernels/cpp/build.py", tmp_path / "tree/reducers/kernels/cpp")  # which is no folder of that name
    make = "import setuptools.build_meta as made; made.build_sdist('made')"
    subprocess.run([sys.executable, "-c", make], cwd=tmp_path / "tree", check=True, capture_output=True)
    (archive,) = (tmp_path / "tree" / "made").iterdir()
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames() if files.getmember(name).isfile()}
    endings = {"reducers": {".py", ".cpp", ".h", ".typed"}, "recorders": {".py", ".cpp", ".typed", ".html", ".css", ".js"}}
    packages = {
        str(path.relative_to(ROOT))
        for package, known in endings.items()
        for path in (ROOT / package).rglob("*")
        if path.suffix in known
    }
    others = {name for name in names - packages if not name.startswith("torch_recorders.egg-info/")}
    assert others == {"LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}
    assert packages - names == set()


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_the_main_jobs_need_nothing_that_other_systems_lack(system: str) -> None:
    run = subprocess.run([sys.executable, ROOT / "tests" / "elsewhere.py", system], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    *failed, last = run.stdout.splitlines()
    assert last == "all done"
    optional = ("reducers.kernels.triton.", "recorders.cli.tutorial ", "recorders.integrations.")
    assert [line for line in failed if not line.startswith(optional)] == []
