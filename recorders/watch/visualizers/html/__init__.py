"""HTML: one self-contained page of a training, or of two side by side."""

from recorders.watch.visualizers.html.page import html_report, write_report
from recorders.watch.visualizers.html.runs import Run
from recorders.watch.visualizers.html.visualizer import HtmlVisualizer

__all__ = ["HtmlVisualizer", "Run", "html_report", "write_report"]
