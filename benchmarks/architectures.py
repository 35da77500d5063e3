"""Architectures of transformers: does recording leave each training as it is, with right numbers and without a false word?

Each model is made of its own configuration, with few and small layers, and is examined by `benchmarks/examining.py`.
Models that cannot be made so small, or that take other inputs than text, pictures or sound, are counted and left out. Run from the
root, for a quarter of an hour: python -m benchmarks.architectures [NAME ...]
"""

from __future__ import annotations

import argparse
import logging
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.examining import examine, loss_of
from benchmarks.measure import write

TASKS = ("CausalLM", "Seq2SeqLM", "MaskedLM", "ImageClassification", "AudioClassification", "")
LARGEST = 10_000_000  # parameters
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_feat_extract_layers", "num_conv_pos_embedding_groups"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_conv_pos_embeddings"), 4),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("state_size", "d_state", "patch_size", "attention_window", "block_size"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("image_size", "max_source_positions", "max_target_positions"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_mel_bins", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "vocab_size": 120,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

Given = dict[str, Tensor]


def architectures() -> Iterator[tuple[str, Any]]:
    """Yields the name of each, and the class that makes a model of its configuration, for the first task that it has."""
    for kind in sorted(transformers.CONFIG_MAPPING.keys()):
        for task in TASKS:
            auto = getattr(transformers, f"AutoModelFor{task}" if task else "AutoModel")
            try:
                known = transformers.CONFIG_MAPPING[kind] in set(auto._model_mapping)
            except Exception:  # of a configuration whose library is not installed
                break
            if known:
                yield kind, auto
                break


def shrink(config: Any, depth: int = 0) -> None:
    """Makes a configuration, and those inside, that of a small model."""
    for name, size in {**SIZES, **TOKENS}.items():
        now = getattr(config, name, None)
        if name in TOKENS or (now is not None and not isinstance(now, (list, dict))):
            try:
                setattr(config, name, size)
            except Exception:  # a few of them are computed
                continue
    if isinstance(getattr(config, "layer_types", None), list):
        config.layer_types = config.layer_types[:2]
    for inner in list(vars(config).values()):
        if isinstance(inner, transformers.PretrainedConfig) and depth < 3:
            shrink(inner, depth + 1)


def inputs(net: Any) -> Iterator[Given]:
    """Yields what the model may take, by the name of its first input."""
    words = torch.randint(3, 100, (4, 16))
    size, channels = getattr(net.config, "image_size", 32), getattr(net.config, "num_channels", 3) or 3
    size = size if isinstance(size, int) else 32
    takes: dict[str, list[Given]] = {
        "input_ids": [{"labels": words}, {}, {"decoder_input_ids": words}],
        "pixel_values": [{"pixel_values": torch.randn(4, channels, side, side)} for side in (size, 64, 224)],
        "input_values": [{"input_values": torch.randn(4, *shape)} for shape in ((800,), (4000,), (64, 16))],
        "input_features": [
            {"input_features": torch.randn(4, 16, 64), "decoder_input_ids": words},
            {"input_features": torch.randn(4, 64, 16)},
            {"input_features": torch.randn(4, 16, 64)},
        ],
    }
    for given in takes.get(net.main_input_name, []):
        yield {"input_ids": words, **given} if net.main_input_name == "input_ids" else given


def made(kind: str, auto: Any) -> tuple[nn.Module, Given]:
    """A small model, and what it takes.

    Raises:
        Exception: there is none.
    """
    config = transformers.CONFIG_MAPPING[kind]()
    shrink(config)
    with torch.device("meta"):
        if sum(parameter.numel() for parameter in auto.from_config(config).parameters()) > LARGEST:
            raise LookupError("no small model")
    torch.manual_seed(0)
    net: nn.Module = auto.from_config(config).train()
    for given in inputs(net):
        try:
            loss = loss_of(net(**given))
        except Exception:
            continue
        if loss.isfinite():
            return net, given
    raise LookupError("it takes other inputs")


def row_of(kind: str, auto: Any) -> dict[str, Any]:
    """What is told of an architecture; no class if it was left out. Runs in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    row: dict[str, Any] = {"architecture": kind, "class": "", "wrong": []}
    try:
        net, given = made(kind, auto)
    except Exception as error:
        return row | {"wrong": [f"{type(error).__name__}: {error}"[:200]]}
    try:
        return row | {"class": type(net).__name__, "wrong": examine(net, given)}
    except Exception as error:
        return row | {"class": type(net).__name__, "wrong": [f"{type(error).__name__}: {error}"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="only these architectures")
    chosen = parser.parse_args().name
    each = [one for one in architectures() if not chosen or one[0] in chosen]
    rows, left_out = [], []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for row in pool.map(row_of, *zip(*each, strict=True)):
            if not row["class"]:
                left_out.append(row["architecture"])
                continue
            rows.append(row)
            print(f"{row['class']:48} {'; '.join(row['wrong'])[:200] or 'as it should be'}", flush=True)
    good = sum(not row["wrong"] for row in rows)
    print(f"{good} of {len(rows)} as they should be; {len(left_out)} could not be made small, or take other inputs")
    if not chosen:
        write("architectures", rows=rows, left_out=left_out, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
