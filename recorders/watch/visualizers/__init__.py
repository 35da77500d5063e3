"""Visualizers: objects that show charts. The library that one draws with is imported when the object is made."""

from recorders.watch.charts import ChartView
from recorders.watch.visualizers.choice import as_visualizers
from recorders.watch.visualizers.html import HtmlVisualizer, Run, html_report, write_report
from recorders.watch.visualizers.matplotlib import MatplotlibVisualizer
from recorders.watch.visualizers.mlflow import MlflowVisualizer, mlflow_name, name_of_mlflow
from recorders.watch.visualizers.tensorboard import TensorBoardVisualizer, add_histogram
from recorders.watch.visualizers.text import TextVisualizer
from recorders.watch.visualizers.tracker import TrackerVisualizer
from recorders.watch.visualizers.trackio import TrackioVisualizer
from recorders.watch.visualizers.visualizer import Visualizer
from recorders.watch.visualizers.wandb import WandbVisualizer

__all__ = [
    "ChartView",
    "HtmlVisualizer",
    "MatplotlibVisualizer",
    "MlflowVisualizer",
    "Run",
    "TensorBoardVisualizer",
    "TextVisualizer",
    "TrackerVisualizer",
    "TrackioVisualizer",
    "Visualizer",
    "WandbVisualizer",
    "add_histogram",
    "as_visualizers",
    "html_report",
    "mlflow_name",
    "name_of_mlflow",
    "write_report",
]
