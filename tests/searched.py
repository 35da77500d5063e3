"""What people type into the search of the site, and where it should lead them first."""

from __future__ import annotations

__all__ = ["FIRST"]

FIRST = {
    "gradient norm": "cookbook.html#the-norm-of-each-gradient-at-each-step",  # the recipe, with a table and a picture
    "dead relu": "findings/dead-units.html",  # what it means and what to try
    "dead relus": "findings/dead-units.html",
    "nan": "findings/nonfinite.html",
    "vanishing gradients": "findings/vanishing-gradients.html",
    "exploding gradients": "findings/exploding-gradients.html",
    "loss spike": "findings/loss-jumps.html",
    "early stopping": "diagnosis.html#while-it-trains",
    "activations": "ten-lines.html#what-does-each-layer-put-out",  # three lines and what they print
    "layer outputs": "ten-lines.html#what-does-each-layer-put-out",
    "kurtosis": "reducers.html#moments-mean-variance-skewness-kurtosis",  # what computes it, with its result
    "histogram": "reducers.html#distributions-quantiles-and-histograms",
    "pca": "cookbook.html#means-of-classes-and-principal-axes",
    "hook": "capture.html",  # what hooks see, and when they are called
    "hooks": "capture.html",
    "compile": "capture.html#torch-compile",
    "save": "recordings.html#saving-and-loading",
    "checkpoint": "recordings.html#going-on",
    "resume": "recordings.html#going-on",
    "s3": "recordings.html#object-stores",
    "pandas": "tables.html",
    "overhead": "speed.html#if-it-costs-too-much",  # figures are above it, on the same page
    "attention": "presets.html#attention-entropy",  # one line that records it
    "attention maps": "presets.html#attention-entropy",
    "attention weights": "presets.html#attention-entropy",
    "outliers": "presets.html#outliers",
    "sparse autoencoder": "streams.html#in-saelens",
    "quantization": "calibration.html",
    "fsdp": "distributed.html",
    "multi-gpu": "distributed.html",
    "tensor parallel": "ranks.html#plain-tensors-under-tensor-parallelism",
    "pipeline parallel": "ranks.html#pipelines-and-experts",
    "slurm": "sharded.html#afterwards-job-arrays-and-any-engine",
    "dask": "sharded.html#afterwards-job-arrays-and-any-engine",
    "wandb": "wandb-watch.html",
    "tensorboard": "visualizers.html#tensorboard-weights-biases",
    "mlflow": "visualizers.html#trackers",
    "aim": "visualizers.html#trackers",
    "trackio": "visualizers.html#trackers",
    "jupyter": "visualizers.html#in-a-terminal-in-a-notebook",
    "lightning": "trainers.html#lightning",
    "huggingface": "trainers.html#transformers",
    "hugging face": "trainers.html#transformers",
    "accelerate": "trainers.html#accelerate",
    "ignite": "trainers.html#ignite",
    "keras": "trainers.html#keras",
    "lora": "trainers.html#trl-peft-unsloth",
    "peft": "trainers.html#trl-peft-unsloth",
    "trl": "trainers.html#trl-peft-unsloth",
    "axolotl": "trainers.html#axolotl",
    "ray": "trainers.html#ray-train",
    "torchfunc": "coming-from/torchfunc.html",
    "inferno": "coming-from/inferno.html",
    "monitorch": "coming-from/monitorch.html",
    "transformerlens": "other-tools.html#transformerlens",
    "captum": "other-tools.html#captum",
}
"""What people type, and the page, or the section of it, that answers."""
