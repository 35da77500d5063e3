"""Where charts are shown; each visualizer brings its library in when it is made, not before."""

from recorders.visualizers.matplotlib import MatplotlibVisualizer
from recorders.visualizers.text import TextVisualizer
from recorders.visualizers.visualizer import Visualizer, as_visualizers, play

__all__ = ["MatplotlibVisualizer", "TextVisualizer", "Visualizer", "as_visualizers", "play"]
