"""How the documentation becomes a site: sphinx-build -W --keep-going docs build/docs"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # the docstrings of this tree, whatever is installed

from docutils import nodes

import reducers

project = "torch-recorders"
author = copyright = "The torch-recorders developers"
version = release = reducers.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"torch-recorders {version}"
html_show_sourcelink = False
html_static_path = ["static"]
html_css_files = ["tables.css"]
toc_object_entries_show_parents = "hide"
highlight_language = "none"  # of blocks that name no language
copybutton_prompt_text = ">>> "

myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks keep their outputs, which `tests/test_notebooks.py` compares with those of a run
nb_output_stderr = "remove"
default_role = "py:obj"  # in docstrings, a name in backticks is a link if the library has it

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_rtype = False  # what is before the colon in "Returns:" are keys of a result, no types
napoleon_custom_sections = [("Charts", "params_style")]  # of lenses: what they write into the timeline
autodoc_inherit_docstrings = False  # a method that says nothing new is on the page of its base class
autodoc_default_options = {
    "members": True,  # the names in `__all__`
    "imported-members": True,
    "show-inheritance": True,
    "exclude-members": "reductions_of",  # each statistic has one, derived from its fields
}


def with_searched(app: Any, docname: str, source: list[str]) -> None:
    """Make index entries of comments such as `<!-- search: gradient norm, norm of gradients -->`: the search shows these first."""
    if app.env.doc2path(docname).suffix != ".md":
        return
    source[0] = re.sub(
        r"<!-- search: (.+?) -->",
        lambda found: "```{index} " + ", ".join(f"! {words.strip()}" for words in found[1].split(",")) + "\n```",
        source[0],
    )


def without_none(app: Any, domain: str, kind: str, content: nodes.Element) -> None:
    """Drop the return type None: a reducer says below "Returns" what it computes, and what its constructor returns is nothing."""
    for field in list(content.findall(nodes.field)):
        if field[0].astext() == "rtype" and field[1].astext() == "None":
            field.parent.remove(field)


def setup(app: Any) -> None:
    app.connect("source-read", with_searched)
    app.connect("object-description-transform", without_none, priority=900)  # after types are added
