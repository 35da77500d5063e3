"""Trainers of other libraries, which are trained with a recorder and without: the weights are the same to the bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from recorders import BackwardMonitor, ForwardMonitor, ParameterGradientMonitor, ParameterUpdateMonitor, Recorder, load
from reducers import Norm, PerObservation, Summary

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of these libraries
transformers = pytest.importorskip("transformers")
STEPS = 3


def everything(net: nn.Module) -> Recorder:
    return Recorder(
        out=ForwardMonitor(Summary(), phase="grad", eval_update=False),
        back=BackwardMonitor(Norm()),
        grad=ParameterGradientMonitor(PerObservation(Norm())),
        update=ParameterUpdateMonitor(Norm()),
    ).modules(net)


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    net: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **tokens, max_position_embeddings=64))
    return net


def tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=known, **special)


def text(start: int, words: int) -> str:
    return " ".join(f"w{(3 * start + word) % 29}" for word in range(words))


def options(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "max_steps": STEPS,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": STEPS,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "learning_rate": 1e-2,
    }


def supervised(trl: Any, folder: Path, callbacks: list[Any], adapter: Any = None) -> Any:
    data = pytest.importorskip("datasets").Dataset.from_list([{"text": text(start, 6)} for start in range(16)])
    arguments = trl.SFTConfig(max_length=16, **options(folder))
    return trl.SFTTrainer(
        llama(), arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks, peft_config=adapter
    )


def with_adapter(trl: Any, folder: Path, callbacks: list[Any]) -> Any:
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return supervised(trl, folder, callbacks, adapter)


def preferred(trl: Any, folder: Path, callbacks: list[Any]) -> Any:
    rows = [{"prompt": text(at, 3), "chosen": text(at + 1, 3), "rejected": text(at + 5, 3)} for at in range(16)]
    data = pytest.importorskip("datasets").Dataset.from_list(rows)
    arguments = trl.DPOConfig(max_length=32, **options(folder))
    return trl.DPOTrainer(llama(), llama(), arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)


def rewarded(trl: Any, folder: Path, callbacks: list[Any]) -> Any:
    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    data = pytest.importorskip("datasets").Dataset.from_list([{"prompt": text(start, 3)} for start in range(16)])
    arguments = trl.GRPOConfig(num_generations=4, max_completion_length=5, **options(folder))
    return trl.GRPOTrainer(llama(), reward, arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)


@pytest.mark.parametrize("make", [supervised, with_adapter, preferred, rewarded])
def test_trl_trains_the_same_to_the_bit(make: Callable[..., Any], tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from recorders.integrations.transformers import RecorderCallback

    callback, weights = RecorderCallback(everything), []
    for callbacks in ([], [callback]):
        torch.manual_seed(1)
        trainer = make(trl, tmp_path / str(len(callbacks)), callbacks)
        trainer.train()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert all(weights[1][name].equal(value) for name, value in weights[0].items())
    recorder = callback.recorder
    assert recorder.clock.step == STEPS
    layer = next(name for name in recorder if name.startswith("grad/") and ("lora_B" in name or make is not with_adapter))
    assert len(recorder.snapshot()[layer].leaves()["weight"]) == STEPS
    calls = {recorder.samples[name] for name in recorder if name.startswith("out/") and name.endswith("q_proj")}
    assert calls == {STEPS}
    saved = load(next((tmp_path / "1").glob("checkpoint-*/recorder/rank-0")))
    assert {name: saved.samples[name] for name in recorder} == dict(recorder.samples)


def test_unsloth_trains_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("UNSLOTH_DISABLE_STATISTICS", "1")
    monkeypatch.chdir(tmp_path)  # to which it writes what it compiles
    unsloth = pytest.importorskip("unsloth")  # before TRL, which it changes
    import datasets
    import trl

    from recorders.integrations.transformers import RecorderCallback

    llama().save_pretrained("model")
    tokenizer().save_pretrained("model")
    data = datasets.Dataset.from_list([{"text": text(start, 6)} for start in range(16)])
    callback, weights = RecorderCallback(everything), []
    for callbacks in ([], [callback]):
        fast = unsloth.FastLanguageModel
        net, words = fast.from_pretrained("model", max_seq_length=64, load_in_4bit=False, dtype=torch.float32)
        net = fast.get_peft_model(net, r=4, target_modules=["q_proj", "v_proj"], lora_alpha=8, lora_dropout=0, random_state=0)
        arguments = trl.SFTConfig(max_length=16, dataset_text_field="text", **options(tmp_path / str(len(callbacks))))
        torch.manual_seed(1)
        trainer = trl.SFTTrainer(net, arguments, train_dataset=data, processing_class=words, callbacks=callbacks)
        trainer.train()
        weights.append({name: value.clone() for name, value in trainer.model.state_dict().items()})
    assert all(weights[1][name].equal(value) for name, value in weights[0].items())
    recorder = callback.recorder
    assert recorder.clock.step == STEPS
    calls = {recorder.samples[name] for name in recorder if name.startswith("out/") and name.endswith("_proj")}
    assert calls == {STEPS}  # once each, although its checkpointing runs forwards again
    gradients = [name for name in recorder if name.startswith("grad/") and name.endswith(("lora_A.default", "lora_B.default"))]
    assert {len(recorder.snapshot()[name].leaves()["weight"]) for name in gradients} == {STEPS}


def test_axolotl_trains_the_same_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("axolotl")
    for name, value in {"HF_HUB_OFFLINE": "1", "AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    from axolotl.cli.train import do_cli
    from safetensors.torch import load_file

    llama().save_pretrained("model")
    tokenizer().save_pretrained("model")
    Path("rows.jsonl").write_text("\n".join(json.dumps({"text": text(start, 12)}) for start in range(64)))
    common = {
        "base_model": "model",
        "datasets": [{"path": "rows.jsonl", "type": "completion", "ds_type": "json"}],
        "dataset_prepared_path": "prepared",
        "dataset_num_proc": 1,
        "sequence_len": 16,
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "max_steps": STEPS,
        "save_steps": STEPS,
        "optimizer": "adamw_torch",
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
        "bf16": False,
        "tf32": False,
        "val_set_size": 0,
        "special_tokens": {"pad_token": "<pad>"},
        "attn_implementation": "sdpa",
        "gradient_checkpointing": False,
        "seed": 1,
    }
    plugin = {"plugins": ["recorders.integrations.axolotl.RecorderPlugin"], "recorder": f"{__name__}.everything"}
    for folder, further in {"bare": {}, "recorded": plugin}.items():
        Path("config.yml").write_text(json.dumps({**common, **further, "output_dir": folder}))  # JSON is YAML
        do_cli("config.yml")
    bare, recorded = (load_file(f"{folder}/model.safetensors") for folder in ("bare", "recorded"))
    assert all(recorded[name].equal(weight) for name, weight in bare.items())
    for folder in ("recorded", f"recorded/checkpoint-{STEPS}"):
        found = load(f"{folder}/recorder/rank-0")
        assert found.step == STEPS
        assert {count for name, count in found.samples.items() if name.endswith("q_proj")} == {STEPS}


def test_ray_trains_the_same_to_the_bit_and_ranks_merge(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray")
    torch_trainer = pytest.importorskip("ray.train.torch").TorchTrainer

    def loop(config: dict[str, Any]) -> None:
        import ray.train.torch

        torch.manual_seed(0)
        net = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        rank = ray.train.get_context().get_world_rank()
        monitors = {"out": ForwardMonitor(Summary()), "grad": ParameterGradientMonitor(Norm())}
        recorder = Recorder(**monitors).modules(net, types=nn.Linear).attach(optimizer) if config["record"] else None
        generator = torch.Generator().manual_seed(rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            net(torch.randn(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        merged = None if recorder is None else recorder.sync(to=0)
        if rank == 0:
            torch.save([weight.detach() for weight in net.parameters()], Path(config["folder"], f"{config['record']}.pt"))
            if merged is not None:
                merged.save(Path(config["folder"], "run"))

    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        for record in (False, True):
            torch_trainer(
                loop,
                train_loop_config={"record": record, "folder": str(tmp_path)},
                scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=False),
                run_config=ray.train.RunConfig(storage_path=str(tmp_path / "ray")),
            ).fit()
    finally:
        ray.shutdown()
    bare, recorded = (torch.load(tmp_path / f"{record}.pt") for record in (False, True))
    assert all(one.equal(other) for one, other in zip(bare, recorded, strict=True))
    found = load(tmp_path / "run")
    assert {**found.samples} == {"out/0": 2 * STEPS, "out/2": 2 * STEPS, "grad/0": STEPS, "grad/2": STEPS}


def test_a_loop_as_in_the_script_of_timm_trains_the_same_to_the_bit() -> None:
    timm = pytest.importorskip("timm")
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    def run(record: bool) -> tuple[list[torch.Tensor], Recorder | None]:
        torch.manual_seed(0)
        net = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5, drop_path_rate=0.1)
        optimizer = create_optimizer_v2(net, "adamw", lr=1e-3, weight_decay=0.05)
        average, scheduler = ModelEmaV3(net, decay=0.9), CosineLRScheduler(optimizer, t_initial=STEPS)
        mixup, criterion = Mixup(mixup_alpha=0.8, num_classes=5), SoftTargetCrossEntropy()
        recorder = everything(net).attach(optimizer) if record else None
        numpy.random.seed(0)  # of Mixup
        net.train()
        for step in range(STEPS):
            images, labels = mixup(torch.randn(4, 3, 32, 32), torch.randint(5, (4,)))
            loss = criterion(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            dispatch_clip_grad(net.parameters(), 1.0)
            optimizer.step()
            average.update(net, step=step)
            scheduler.step(step + 1)
        return [value.detach().clone() for value in (*net.parameters(), *average.module.parameters())], recorder

    (bare, _), (recorded, recorder) = run(False), run(True)
    assert all(one.equal(other) for one, other in zip(bare, recorded, strict=True))
    assert recorder is not None
    assert recorder.clock.step == STEPS
    assert {count for name, count in recorder.samples.items() if name.endswith("attn.qkv")} == {STEPS}


class Muon(torch.optim.Optimizer):
    """Matrices are updated by their orthogonalised momentum, as in nanochat."""

    def __init__(self, weights: Any, lr: float = 0.02) -> None:
        super().__init__(weights, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                x = momentum.mul_(0.95).add_(weight.grad)
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                weight.add_(x, alpha=-group["lr"])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_script_with_muon_and_adamw_trains_the_same_to_the_bit(compiled: bool, fresh_compiler: None) -> None:
    def run(record: bool) -> tuple[list[torch.Tensor], Recorder | None]:
        net = llama()
        matrices = [weight for name, weight in net.named_parameters() if weight.ndim == 2 and "layers" in name]
        others = [weight for weight in net.parameters() if all(weight is not matrix for matrix in matrices)]
        optimizers = [torch.optim.AdamW(others, lr=3e-3), Muon(matrices)]
        recorder = everything(net).attach(optimizers[-1]) if record else None
        call = torch.compile(net, backend="aot_eager", dynamic=False) if compiled else net
        torch.manual_seed(1)
        for _ in range(STEPS):
            for _ in range(2):  # micro-batches
                tokens = torch.randint(2, 32, (2, 8))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = call(input_ids=tokens, labels=tokens).loss / 2
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            net.zero_grad(set_to_none=True)
        return [weight.detach().clone() for weight in net.parameters()], recorder

    (bare, _), (recorded, recorder) = run(False), run(True)
    assert all(one.equal(other) for one, other in zip(bare, recorded, strict=True))
    assert recorder is not None
    assert recorder.clock.step == STEPS
    of_layers = {name: count for name, count in recorder.samples.items() if name.endswith("q_proj")}
    assert {name.partition("/")[0]: count for name, count in of_layers.items()} == {
        "out": 2 * STEPS,
        "back": 2 * STEPS,
        "grad": STEPS,
        "update": STEPS,
    }
