"""Nets and trainings of other libraries: does recording leave each as it is, with right numbers and without a false word?

The nets are examined by `benchmarks/examining.py`. Of trainings by loops and optimizers of others the parameters and buffers at
the end must be the same to the bit with `presets.health()`, a step at least must have been recorded, and there must be no warning.
What is not installed is counted and left out. The libraries are installed by hand, in an environment of their own:

    pip install -c constraints.txt -e . torch_geometric x-transformers vit-pytorch vector-quantize-pytorch torchdiffeq lightly \\
        neuraloperator gpytorch e3nn snntorch norse spikingjelly segmentation-models-pytorch monai open-clip-torch ultralytics \\
        pytorch-tabnet rtdl_revisiting_models opacus tensordict torchrl pytorch-metric-learning skorch pytorch-ignite lightning \\
        stable-baselines3 pyro-ppl pytorch-optimizer denoising-diffusion-pytorch fastai

Run from the root, for some minutes: python -m benchmarks.libraries [NAME ...]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.examining import Given, digest, examine, seed
from benchmarks.measure import write
from recorders import RecordingWarning, presets

Watch = Callable[[nn.Module], object]
NETS: dict[str, Callable[[], tuple[nn.Module, Given]]] = {}
LOOPS: dict[str, Callable[[Watch], nn.Module]] = {}


def net(name: str) -> Callable[[Callable[[], tuple[nn.Module, Given]]], None]:
    """Adds a net and what it is called with, under the name of its library in the index and its own."""
    return lambda make: NETS.update({name: make})


def loop(name: str) -> Callable[[Callable[[Watch], nn.Module]], None]:
    """Adds a training, which gives its net to a function before it begins."""
    return lambda train: LOOPS.update({name: train})


def library(name: str) -> Any:
    """Imports a module of a library, as late as it is needed."""
    return importlib.import_module(name)


def edges(nodes: int = 20, count: int = 60) -> Tensor:
    return torch.randint(0, nodes, (2, count))


def mlp(inputs: int = 8, outputs: int = 2) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.ReLU(), nn.Linear(16, outputs))


def samples() -> tuple[Tensor, Tensor]:
    x = torch.randn(256, 8, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] + x[:, 1] > 0).long()


def batches() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples()), 32)


class Calling(nn.Module):
    """A net that is called by a function of the net and its inputs."""

    def __init__(self, call: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any) -> Any:
        return self.call(self, *args)


# Graphs


def convolutions(kind: str) -> Callable[[], tuple[nn.Module, Given]]:
    def make() -> tuple[nn.Module, Given]:
        layer = getattr(library("torch_geometric.nn"), kind)
        model = Calling(lambda m, x, e: m.second(m.act(m.first(x, e)), e), first=layer(8, 16), act=nn.ReLU(), second=layer(16, 4))
        return model, (torch.randn(20, 8), edges())

    return make


NETS |= {
    f"torch_geometric {kind}": convolutions(kind)
    for kind in ["GCNConv", "SAGEConv", "GATConv", "GATv2Conv", "TransformerConv", "GENConv", "MFConv", "TAGConv", "ClusterGCNConv"]
}


@net("torch_geometric of a batch of graphs")
def _() -> tuple[nn.Module, Given]:
    nn_, data = library("torch_geometric.nn"), library("torch_geometric.data")
    graphs = [data.Data(x=torch.randn(5 + i, 8), edge_index=edges(5, 12)) for i in range(4)]
    model = Calling(
        lambda m, batch: m.head(nn_.global_mean_pool(m.layer(batch.x, batch.edge_index).relu(), batch.batch)),
        layer=nn_.GCNConv(8, 16),
        head=nn.Linear(16, 2),
    )
    return model, (data.Batch.from_data_list(graphs),)


@net("torch_geometric of several kinds of nodes")
def _() -> tuple[nn.Module, Given]:
    nn_ = library("torch_geometric.nn")
    kinds = {("a", "to", "b"): nn_.SAGEConv((8, 8), 4), ("b", "to", "a"): nn_.SAGEConv((8, 8), 4)}
    between = {("a", "to", "b"): edges(10, 30), ("b", "to", "a"): edges(10, 30)}
    return nn_.HeteroConv(kinds), ({"a": torch.randn(10, 8), "b": torch.randn(12, 8)}, between)


@net("torch_geometric of a sparse matrix")
def _() -> tuple[nn.Module, Given]:
    matrix = torch.sparse_coo_tensor(edges(), torch.ones(60), (20, 20)).coalesce()
    return library("torch_geometric.nn").GCN(8, 16, 2, 4), (torch.randn(20, 8), matrix)


# Texts and pictures


@net("x-transformers decoder")
def _() -> tuple[nn.Module, Given]:
    x = library("x_transformers")
    inner = x.TransformerWrapper(
        num_tokens=50, max_seq_len=32, attn_layers=x.Decoder(dim=32, depth=2, heads=4, rotary_pos_emb=True)
    )
    return x.AutoregressiveWrapper(inner), (torch.randint(0, 50, (4, 17)),)


@net("x-transformers encoder")
def _() -> tuple[nn.Module, Given]:
    x = library("x_transformers")
    layers = x.Encoder(dim=32, depth=2, heads=4, use_rmsnorm=True, ff_glu=True, attn_qk_norm=True)
    return x.TransformerWrapper(num_tokens=50, max_seq_len=32, num_memory_tokens=4, attn_layers=layers), (
        torch.randint(0, 50, (4, 16)),
    )


OF_PICTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": (
        "vit_pytorch",
        {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48},
    ),
    "SimpleViT": (
        "vit_pytorch",
        {"image_size": 32, "patch_size": 8, "num_classes": 10, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48},
    ),
    "NesT": (
        "vit_pytorch.nest",
        {
            "image_size": 32,
            "patch_size": 4,
            "num_classes": 10,
            "dim": 16,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
        },
    ),
    "MobileViT": (
        "vit_pytorch.mobile_vit",
        {
            "image_size": (64, 64),
            "dims": [24, 32, 40],
            "channels": [8, 8, 16, 16, 24, 24, 32, 32, 40, 40, 48],
            "num_classes": 10,
        },
    ),
}


def of_pictures(name: str) -> Callable[[], tuple[nn.Module, Given]]:
    def make() -> tuple[nn.Module, Given]:
        module, options = OF_PICTURES[name]
        size = options["image_size"]
        side = size if isinstance(size, int) else size[0]
        return getattr(library(module), name)(**options), (torch.randn(4, 3, side, side),)

    return make


NETS |= {f"vit-pytorch {name}": of_pictures(name) for name in OF_PICTURES}


@net("open_clip_torch CLIP")
def _() -> tuple[nn.Module, Given]:
    seeing = {"layers": 2, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    reading = {"context_length": 16, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}
    model = library("open_clip.model").CLIP(32, vision_cfg=seeing, text_cfg=reading)
    return model, (torch.randn(4, 3, 32, 32), torch.randint(1, 50, (4, 16)))


@net("ultralytics YOLO")
def _() -> tuple[nn.Module, Given]:
    return library("ultralytics.nn.tasks").DetectionModel("yolov8n.yaml", nc=3, verbose=False), (torch.randn(2, 3, 64, 64),)


@net("segmentation_models_pytorch Unet")
def _() -> tuple[nn.Module, Given]:
    return library("segmentation_models_pytorch").Unet("resnet18", encoder_weights=None, classes=2), (torch.randn(2, 3, 64, 64),)


@net("monai UNet")
def _() -> tuple[nn.Module, Given]:
    options = {"in_channels": 1, "out_channels": 2, "channels": (4, 8, 16), "strides": (2, 2), "num_res_units": 1}
    return library("monai.networks.nets").UNet(spatial_dims=3, **options), (torch.randn(2, 1, 16, 16, 16),)


@net("monai SwinUNETR")
def _() -> tuple[nn.Module, Given]:
    options = {"in_channels": 1, "out_channels": 2, "feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 2)}
    return library("monai.networks.nets").SwinUNETR(spatial_dims=2, **options), (torch.randn(1, 1, 64, 64),)


@net("denoising-diffusion-pytorch")
def _() -> tuple[nn.Module, Given]:
    d = library("denoising_diffusion_pytorch")
    return d.GaussianDiffusion(d.Unet(dim=16, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=20), (
        torch.rand(2, 3, 16, 16),
    )


@net("lightly SimCLR")
def _() -> tuple[nn.Module, Given]:
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = Calling(
        lambda m, x, y: m.loss(m.head(m.body(x)), m.head(m.body(y))),
        body=body,
        head=library("lightly.models.modules").SimCLRProjectionHead(8, 16, 8),
        loss=library("lightly.loss").NTXentLoss(),
    )
    return model, (torch.randn(8, 3, 16, 16), torch.randn(8, 3, 16, 16))


@net("pytorch-metric-learning ArcFace")
def _() -> tuple[nn.Module, Given]:
    loss = library("pytorch_metric_learning.losses").ArcFaceLoss(4, 8)
    return Calling(lambda m, x, y: m.loss(m.body(x), y), body=mlp(8, 8), loss=loss), (torch.randn(16, 8), torch.arange(16) % 4)


# Tables, codes, equations, spikes


@net("pytorch-tabnet")
def _() -> tuple[nn.Module, Given]:
    network = library("pytorch_tabnet.tab_network").TabNetNoEmbeddings(
        8, 2, n_d=8, n_a=8, n_steps=2, group_attention_matrix=torch.eye(8)
    )
    return network, (torch.randn(32, 8),)


@net("rtdl_revisiting_models FTTransformer")
def _() -> tuple[nn.Module, Given]:
    options = {"d_out": 2, "n_blocks": 2, "d_block": 16, "attention_n_heads": 4, "attention_dropout": 0.1, "ffn_d_hidden": 24}
    dropouts = {"ffn_d_hidden_multiplier": None, "ffn_dropout": 0.1, "residual_dropout": 0.0}
    model = library("rtdl_revisiting_models").FTTransformer(n_cont_features=4, cat_cardinalities=[3, 3], **options, **dropouts)
    return model, (torch.randn(16, 4), torch.randint(0, 3, (16, 2)))


@net("vector-quantize-pytorch")
def _() -> tuple[nn.Module, Given]:
    quantised = library("vector_quantize_pytorch").ResidualVQ(dim=16, codebook_size=32, num_quantizers=3)

    def call(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        code, _, loss = m.codes(m.encoder(x))
        return m.decoder(code), loss.sum()

    return Calling(call, encoder=nn.Linear(8, 16), codes=quantised, decoder=nn.Linear(16, 8)), (torch.randn(4, 12, 8),)


@net("torchdiffeq")
def _() -> tuple[nn.Module, Given]:
    solve, field = library("torchdiffeq").odeint, nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    return Calling(lambda m, y: solve(lambda t, x: m.field(x), y, torch.linspace(0, 1, 5)), field=field), (torch.randn(8, 2),)


@net("neuraloperator FNO")
def _() -> tuple[nn.Module, Given]:
    model = library("neuralop.models").FNO(n_modes=(4, 4), in_channels=2, out_channels=1, hidden_channels=8, n_layers=2)
    return model, (torch.randn(2, 2, 16, 16),)


@net("e3nn")
def _() -> tuple[nn.Module, Given]:
    o3, irreps = library("e3nn.o3"), "4x0e+2x1o"
    product = o3.FullyConnectedTensorProduct(irreps, "0e+1o", irreps)
    return Calling(lambda m, x, y: m.product(m.first(x), y), first=o3.Linear(irreps, irreps), product=product), (
        torch.randn(12, 10),
        torch.randn(12, 4),
    )


@net("snntorch")
def _() -> tuple[nn.Module, Given]:
    neurons = library("snntorch")

    def call(m: Any, x: Tensor) -> Tensor:
        first, last, seen = m.first.init_leaky(), m.last.init_leaky(), []
        for _ in range(5):
            spikes, first = m.first(m.before(x), first)
            _, last = m.last(m.between(spikes), last)
            seen.append(last)
        return torch.stack(seen)

    parts = {"before": nn.Linear(8, 16), "first": neurons.Leaky(beta=0.9), "between": nn.Linear(16, 4)}
    return Calling(call, **parts, last=neurons.Leaky(beta=0.9, learn_beta=True)), (torch.randn(8, 8),)


@net("norse")
def _() -> tuple[nn.Module, Given]:
    n = library("norse.torch")

    def call(m: Any, x: Tensor) -> Tensor:
        state, seen = None, []
        for _ in range(5):
            found, state = m.body(x, state)
            seen.append(found)
        return torch.stack(seen)

    return Calling(call, body=n.SequentialState(nn.Linear(8, 16), n.LIFCell(), nn.Linear(16, 4), n.LICell())), (torch.randn(8, 8),)


@net("spikingjelly")
def _() -> tuple[nn.Module, Given]:
    neuron, layer = library("spikingjelly.activation_based.neuron"), library("spikingjelly.activation_based.layer")
    reset = library("spikingjelly.activation_based.functional").reset_net
    body = nn.Sequential(layer.Linear(8, 16), neuron.LIFNode(), layer.Linear(16, 4), neuron.LIFNode())
    return Calling(lambda m, x: (reset(m.body), torch.stack([m.body(x) for _ in range(4)]))[1], body=body), (torch.randn(8, 8),)


@net("tensordict")
def _() -> tuple[nn.Module, Given]:
    held = library("tensordict").TensorDict({"x": torch.randn(16, 8)}, [16])
    return library("tensordict.nn").TensorDictModule(mlp(), ["x"], ["y"]), (held,)


@net("opacus DPLSTM")
def _() -> tuple[nn.Module, Given]:
    inner = library("opacus.layers").DPLSTM(8, 16, batch_first=True)
    return Calling(lambda m, x: m.head(m.inner(x)[0]), inner=inner, head=nn.Linear(16, 2)), (torch.randn(4, 6, 8),)


# Loops of others


@loop("skorch")
def _(watch: Watch) -> nn.Module:
    x, y = (one.numpy() for one in samples())
    trainer = library("skorch").NeuralNetClassifier(mlp(), criterion=nn.CrossEntropyLoss, max_epochs=3, lr=0.1, verbose=0)
    watch(trainer.initialize().module_)
    return trainer.partial_fit(x, y).module_


@loop("pytorch-ignite")
def _(watch: Watch) -> nn.Module:
    model = mlp()
    watch(model)
    engine = library("ignite.engine").create_supervised_trainer(
        model, torch.optim.SGD(model.parameters(), 0.1), nn.CrossEntropyLoss()
    )
    engine.run(batches(), max_epochs=3)
    return model


@loop("lightning")
def _(watch: Watch) -> nn.Module:
    lightning = library("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def training_step(self, batch: Any, index: int) -> Tensor:
            return F.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), 1e-2)

    model, quiet = Module(), ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    watch(model.inner)
    lightning.Trainer(max_epochs=2, accelerator="cpu", **dict.fromkeys(quiet, False)).fit(model, batches())
    return model.inner


@loop("fastai with OptimWrapper")
def _(watch: Watch) -> nn.Module:
    core, optimizer = library("fastai.data.core"), library("fastai.optimizer")
    learner = library("fastai.learner").Learner(
        core.DataLoaders(batches(), batches()),
        mlp(),
        loss_func=nn.CrossEntropyLoss(),
        opt_func=lambda parameters, **options: optimizer.OptimWrapper(parameters, torch.optim.SGD, lr=0.1),
    )
    learner.remove_cbs(learner.cbs[-1:])  # the bar of progress
    watch(learner.model)
    with learner.no_logging():
        learner.fit(2)
    return learner.model


@loop("pytorch-tabnet, its fit")
def _(watch: Watch) -> nn.Module:
    x, y = (one.numpy() for one in samples())
    model = library("pytorch_tabnet.tab_model").TabNetClassifier(n_d=8, n_a=8, n_steps=2, verbose=0, seed=0)
    model.fit(x, y, max_epochs=1, batch_size=64, virtual_batch_size=32)
    watch(model.network)
    model.fit(x, y, max_epochs=3, batch_size=64, virtual_batch_size=32, warm_start=True)
    return model.network


@loop("stable_baselines3 PPO")
def _(watch: Watch) -> nn.Module:
    agent = library("stable_baselines3").PPO(
        "MlpPolicy", "CartPole-v1", n_steps=64, batch_size=32, n_epochs=2, seed=0, device="cpu"
    )
    watch(agent.policy)
    return agent.learn(256).policy


@loop("stable_baselines3 DQN")
def _(watch: Watch) -> nn.Module:
    agent = library("stable_baselines3").DQN("MlpPolicy", "CartPole-v1", learning_starts=32, seed=0, device="cpu")
    watch(agent.q_net)
    return agent.learn(200).q_net


@loop("pyro-ppl")
def _(watch: Watch) -> nn.Module:
    pyro, infer = library("pyro"), library("pyro.infer")
    normal, model = library("pyro.distributions").Normal, mlp(8, 1)
    pyro.clear_param_store()

    def story(x: Tensor, y: Tensor) -> None:
        pyro.module("net", model)
        with pyro.plate("samples", len(x)):
            pyro.sample("outcome", normal(model(x).squeeze(-1), 1.0), obs=y)

    watch(model)
    inference = infer.SVI(story, lambda x, y: None, library("pyro.optim").Adam({"lr": 0.01}), infer.Trace_ELBO())
    for _ in range(20):
        inference.step(samples()[0], samples()[1].float())
    return model


@loop("gpytorch")
def _(watch: Watch) -> nn.Module:
    gp = library("gpytorch")

    class Process(gp.models.ExactGP):
        def __init__(self, x: Tensor, y: Tensor, likelihood: Any) -> None:
            super().__init__(x, y, likelihood)
            self.features, self.mean = nn.Linear(8, 2), gp.means.ConstantMean()
            self.covariance = gp.kernels.ScaleKernel(gp.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            features = self.features(x)
            return gp.distributions.MultivariateNormal(self.mean(features), self.covariance(features))

    x, y = samples()[0][:40], samples()[1][:40].float()
    likelihood = gp.likelihoods.GaussianLikelihood()
    model = Process(x, y, likelihood).train()
    watch(model)
    optimizer, likelihood_of = torch.optim.Adam(model.parameters(), 0.05), gp.mlls.ExactMarginalLogLikelihood(likelihood, model)
    for _ in range(10):
        optimizer.zero_grad()
        (-likelihood_of(model(x), y)).backward()
        optimizer.step()
    return model


@loop("opacus")
def _(watch: Watch) -> nn.Module:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    given = {"module": model, "optimizer": optimizer, "data_loader": batches(), "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    private, optimizer, loader = library("opacus").PrivacyEngine().make_private(**given)
    watch(private)
    for x, y in loader:
        optimizer.zero_grad()
        F.cross_entropy(private(x), y).backward()
        optimizer.step()
    return private


@loop("torchrl DQN")
def _(watch: Watch) -> nn.Module:
    actor = library("torchrl.modules").QValueActor(mlp(), in_keys=["observation"], spec=None, action_space="one_hot")
    watch(actor)
    loss = library("torchrl.objectives").DQNLoss(actor, action_space="one_hot", delay_value=False)
    optimizer, (x, y) = torch.optim.Adam(loss.parameters(), 1e-2), samples()
    ended = torch.zeros(256, 1).bool()
    later = {"observation": x.flip(0), "reward": x[:, :1], "done": ended, "terminated": ended}
    for _ in range(5):
        held = library("tensordict").TensorDict({"observation": x, "action": F.one_hot(y, 2), "next": later}, [256])
        optimizer.zero_grad()
        loss(held)["loss"].backward()
        optimizer.step()
    return actor


def by_optimizer(name: str) -> Callable[[Watch], nn.Module]:
    def train(watch: Watch) -> nn.Module:
        model, (x, y) = mlp(), samples()
        watch(model)
        groups: Any = model.parameters()
        if name == "Muon":
            groups = [
                {"params": [p for p in model.parameters() if (p.ndim > 1) == wide], "use_muon": wide} for wide in (True, False)
            ]
        optimizer = getattr(library("pytorch_optimizer"), name)(groups, lr=1e-3)
        if hasattr(optimizer, "train"):
            optimizer.train()
        for _ in range(6):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        return model

    return train


OPTIMIZERS = "Lion AdaBelief Lamb Shampoo SOAP Muon ScheduleFreeAdamW GaLore Adan AdEMAMix CAME MARS StableAdamW Tiger"
LOOPS |= {f"pytorch_optimizer {name}": by_optimizer(name) for name in OPTIMIZERS.split()}


def examine_loop(train: Callable[[Watch], nn.Module]) -> list[str]:
    """What is wrong with a training that is recorded; an empty list if nothing is."""

    def end(watch: Watch) -> str:
        seed(0)
        model = train(watch)
        return digest([*model.parameters(), *model.buffers()])

    plain = end(lambda model: None)
    if end(lambda model: None) != plain:
        return ["two trainings without a recorder differ"]
    recorders: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", RecordingWarning)
        recorded = end(lambda model: recorders.append(presets.health().modules(model)))
    (recorder,) = recorders
    recorder.deregister()
    wrong = ["the training that is recorded is another"] if recorded != plain else []
    if not any(one.samples for name, one in recorder.items() if name.startswith("update/")):
        wrong.append("no step was recorded")
    return wrong + [f"warns: {one.message}" for one in caught if issubclass(one.category, RecordingWarning)]


def row_of(name: str) -> dict[str, Any]:
    """What is told of a net or a training; no version if it was left out. Runs in a process of its own."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    row: dict[str, Any] = {"name": name, "version": "", "wrong": []}
    try:
        installed = version(name.partition(" ")[0].rstrip(","))
        if name in NETS:
            seed(0)
            model, given = NETS[name]()
            return row | {"version": installed, "wrong": examine(model.train(), given)}
        return row | {"version": installed, "wrong": examine_loop(LOOPS[name])}
    except Exception as error:
        return row | {"wrong": [f"{type(error).__name__}: {error}"[:300]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="only these nets and trainings, whose names begin so")
    chosen = tuple(parser.parse_args().name)
    rows, left_out = [], []
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for row in pool.map(row_of, [name for name in (*NETS, *LOOPS) if not chosen or name.startswith(chosen)]):
            (rows if row["version"] else left_out).append(row)
            print(f"{row['name']:44} {'; '.join(row['wrong'])[:300] or 'as it should be'}", flush=True)
    good = sum(not row["wrong"] for row in rows)
    print(f"{good} of {len(rows)} as they should be; {len(left_out)} could not be made or are not installed")
    if not chosen:
        write("libraries", rows=rows, left_out=left_out)


if __name__ == "__main__":
    main()
