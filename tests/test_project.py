"""What belongs to the project and not to its code: one version, extras with code behind them, a quick subset, coverage."""

from __future__ import annotations

import configparser
import re

import pytest
from paths import ROOT

import recorders
import reducers

TOOLS = {"demo", "test", "bench", "docs", "all", "parity", "gpu-tests", "trackers", "calibration-tests"}
"""Extras that bring whole environments. Every other extra is one that code asks for by `require(module, extra)`."""
SERVERS = {"mlflow", "trackio"}
"""Extras that bring a server each, so who wants them says so: the extra `trackers` has them, `all` has not."""
EXAMPLES = {"dask"}
"""Or one that an example imports."""


def extras() -> dict[str, str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return dict(config["options.extras_require"])


def test_the_version_is_the_same_wherever_it_is_written() -> None:
    assert recorders.__version__ == reducers.__version__
    assert f"\nversion: {reducers.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert "\nversion = attr: reducers.__version__\n" in (ROOT / "setup.cfg").read_text()


def test_every_extra_has_code_behind_it_and_nearly_all_are_in_all() -> None:
    code = "\n".join(path.read_text() for path in (ROOT / "recorders").rglob("*.py"))
    asked_for = set(re.findall(r'require\([^)]*"(\w+)"\)', code))
    for example in (ROOT / "examples").glob("*.py"):
        asked_for |= EXAMPLES & {line.split(".")[0].removeprefix("import ") for line in example.read_text().splitlines()}
    assert extras().keys() - TOOLS <= asked_for <= extras().keys()
    named = re.search(r"torch-recorders\[(.*)\]", extras()["all"])
    assert named is not None
    assert set(named[1].split(",")) == extras().keys() - (TOOLS - {"demo"}) - SERVERS


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", ".ci/run"])
def test_the_quick_subset_is_named_and_its_files_exist(page: str) -> None:
    assert "@tests/quick.txt" in (ROOT / page).read_text()
    files = (ROOT / "tests" / "quick.txt").read_text().split()
    assert files == sorted(set(files))
    assert [name for name in files if not (ROOT / name).is_file()] == []
