"""iFAM: outputs, losses, a training step, a short run, and interventions."""

import tempfile
from pathlib import Path

import torch

import seecause as sc
from seecause.faithful.interventions import network
from seecause.faithful.losses import TrainingLosses
from tests.golden.record import DEVICE, Named, batch, golden, model

IFAM = "critters-ifam"


@golden("faithful")
def outputs(dtype) -> Named:
    view = model(IFAM, dtype)
    images, labels, _ = batch(IFAM, dtype, "critters:balanced:test", 8)
    yield "view", view(images)
    net = network(view)
    with torch.no_grad():
        out = net(images)
    for name in (
        "logits",
        "maps",
        "mask",
        "pair",
        "embeddings",
        "part_logits",
        "dots",
        "distances",
    ):
        yield name, getattr(out, name)
    without = sc.faithful.leave_one_out(net, [(images, labels)])
    yield "leave-one-out", without.without
    with sc.faithful.intervene(net, drop_parts=[1]):
        yield "dropped", view(images)
    yield "thresholds", sc.faithful.calibrate(net, images, 0.9)[0].values
    with sc.faithful.intervene(net, quantile=0.9):
        yield "trusted", view(images)
    yield "caap", sc.attribute(view, images[:2], labels[:2], method="caap").maps


@golden("faithful")
def training_step(dtype) -> Named:
    """Losses and gradients of one step, and the parameters after it."""
    view = sc.load(f"builtin:{IFAM}", device=DEVICE, dtype=dtype)
    images, labels, _ = batch(IFAM, dtype, "critters:balanced:test", 8)
    net = network(view).train().requires_grad_(True)
    losses = TrainingLosses(net)
    total, named, _ = losses(images, labels, torch.arange(len(images)), 3, 5)
    total.backward()
    yield "total", total
    yield from named.items()
    learning = [p for p in net.parameters() if p.grad is not None]
    yield "gradients", torch.cat([p.grad.flatten() for p in learning])
    optimizer = torch.optim.SGD(learning, lr=0.01)
    optimizer.step()
    yield "parameters", torch.cat([p.detach().flatten() for p in learning])


@golden("faithful", dtypes=("float32",), slow=True)
def training_run(dtype) -> Named:
    """Two steps of `train`, and what the kept network answers."""
    with tempfile.TemporaryDirectory() as folder:
        config = sc.faithful.TrainConfig(
            data="critters:simplicity", backbone="builtin:critters-vit", parts=4, epochs=1,
            batch=16, limit=32, val_limit=16, workers=0, device=DEVICE,
            out=str(Path(folder, "run")),
            learning_rate=5e-4, prototype_factor=20, head_factor=20,
        )  # fmt: skip
        done = sc.faithful.train(config)
        yield "steps", done.steps
        yield "best", done.best
        kept = sc.load(str(Path(folder, "run", "best")))
        images, _, _ = batch(IFAM, dtype, "critters:balanced:test", 8)
        yield "logits", kept(images)
        yield "parameters", torch.cat([p.flatten() for p in network(kept).parameters()])
