"""Where charts are shown; each visualizer brings its library in when it is made, not before."""

from recorders.watch.visualizers.choice import as_visualizers, play
from recorders.watch.visualizers.matplotlib import MatplotlibVisualizer
from recorders.watch.visualizers.text import TextVisualizer
from recorders.watch.visualizers.visualizer import Visualizer

__all__ = ["MatplotlibVisualizer", "TextVisualizer", "Visualizer", "as_visualizers", "play"]
