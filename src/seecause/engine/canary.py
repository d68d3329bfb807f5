"""Run-time checks that interventions take effect.

The verified wrap (`verify.py`) shows that a view computes what the native model computes. It does
not show that an edit reaches the native computation: a hook may never fire, a library may take
another path than the one that was edited. So an intervention is checked when a model first uses it:

    without an edit   the output is unchanged, bit for bit
    with a known one  the native output changes as the engine computes

Passed checks are cached in the view until one of its parameters changes, so that repeated calls
cost little. Edits of vision-language models are checked in `lvlm/edit.py`, hidden patches of
iFAM in `faithful/interventions.py`, exported checkpoints where they are written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from seecause.engine.forks import Head
from seecause.engine.verify import Probe, random_images, tolerance_of
from seecause.errors import EditLost, UnsupportedModel
from seecause.models.base import ImageModel, library_versions, weights_key
from seecause.models.block import columns, find_attention, find_output
from seecause.models.view import VisionModel

SINGLE = 1e-5  # native parts that compute in float32 whatever the model's dtype is


@dataclass(frozen=True)
class Proof(Probe):
    """A passed check of a known edit: also how far it moved the output, relative to the largest."""

    moved: float = 0.0


def once(model: Any, kind: str | None, check: Callable[[], Proof]) -> Proof:
    """The proof of one kind of edit, made on its first use and again when a parameter changed."""
    key = weights_key([tensor for tensor in model.tensors() if isinstance(tensor, nn.Parameter)])
    if model.memo.get("proven weights") != key:
        model.memo.update({"proven weights": key, "proofs": {}})
    proofs: dict[str | None, Proof] = model.memo.setdefault("proofs", {})
    if kind not in proofs:
        proofs[kind] = check()
    return proofs[kind]


def same_bits(name: str, part: str, empty: Tensor, plain: Tensor) -> None:
    """Raises if an empty edit changes the output."""
    if not torch.equal(empty, plain):
        by = float((empty - plain).abs().max())
        raise EditLost(name, part, f"an empty edit changes its output by {by:.2g}", used_versions())


def as_computed(
    name: str,
    part: str,
    plain: Tensor,
    edited: Tensor,
    expected: Tensor,
    compared: str,
    *,
    near: float = 0.0,
) -> Proof:
    """Raises if a known edit of `plain` does not have the effect that the engine computes, within
    the tolerance of its dtype, or `near` if that is larger."""
    near = max(near, tolerance_of(plain.dtype))
    plain, edited, expected = plain.double(), edited.double(), expected.double()
    size = float(plain.abs().max().clamp_min(1e-12))
    away, moved, error = (
        float((a - b).abs().max()) / size
        for a, b in ((expected, plain), (edited, plain), (edited, expected))
    )
    if not error <= 2 * near or (away > near / 4 and error > away / 2):
        reason = (
            f"a known edit should move the output by {away:.2g} of its largest value; it moves by"
            f" {moved:.2g}, and ends {error:.2g} off"
        )
        raise EditLost(name, part, reason, used_versions())
    return Proof(name, error, compared, moved)


def used_versions() -> str:
    """The libraries that run native models, and their versions."""
    versions = library_versions()
    return ", ".join(f"{name} {versions[name]}" for name in ("torch", "timm", "transformers"))


def some_heads(model: Any) -> list[Head]:
    """Half of the heads of every block, drawn with a fixed seed: never all, never a shift of the
    others."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for layer, block in enumerate(model.blocks):
        heads = torch.randperm(block.heads, generator=generator)[: max(1, block.heads // 2)]
        chosen += [(layer, int(head)) for head in heads.sort().values]
    return chosen


def gates_of(model: Any, heads: Iterable[Head]) -> Tensor:
    """Ones [L, H], zero at `heads`."""
    gates = torch.ones(model.n_layers, model.n_heads)
    for layer, head in heads:
        gates[layer, head] = 0
    return gates


@contextmanager
def without_columns(model: VisionModel, heads: Iterable[Head]) -> Iterator[None]:
    """Inside the block, native output projections have zeros where they read `heads`. The native
    parameters themselves are put back, unchanged."""
    with ExitStack() as stack:
        for layer, block in enumerate(model.blocks):
            gone = [head for at, head in heads if at == layer]
            if not gone:
                continue
            projection = find_output(find_attention(block.owner)[1])
            weight = projection.weight.detach().clone()
            places = columns(gone, weight.shape[1] // block.heads)
            weight[:, places.to(weight.device)] = 0
            own = projection._parameters["weight"]
            stack.callback(projection._parameters.__setitem__, "weight", own)
            projection._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
        yield


@torch.no_grad()
def prove_gates(model: VisionModel) -> Proof:
    """Gates on heads against the native model, with the same columns of its output projections
    zeroed."""
    images, heads = random_images(model)[:1], some_heads(model)
    own, model.gates = model.gates, None
    try:
        with model.eval_mode():
            plain = model(images)
            with model.gated(gates_of(model, [])):
                same_bits("gates", model.family, model(images), plain)
            with model.gated(gates_of(model, heads)):
                edited = model(images)
            try:
                with without_columns(model, heads):
                    expected = model(images) if model.merged else model.native(images)
            except UnsupportedModel as refusal:  # no linear projection to compare with
                return Proof("gates", 0.0, f"not compared: {refusal}")
    finally:
        model.gates = own
    seen = f"{len(heads)} heads removed, against zeroed weights in the native model"
    return as_computed("gates", model.family, plain, edited, expected, seen)


@torch.no_grad()
def prove_patch(model: VisionModel) -> Proof:
    """`sc.patch` against the native model: with all states of another image, the logits are those
    of that image."""
    from seecause.engine.patching import Site, run_patched

    here, there = (image[None] for image in random_images(model))
    with model.eval_mode():
        plain, layer = model(here), model.n_layers // 2
        same_bits("patch", model.family, run_patched(model, here, there, [[]])[0], plain)
        edited = run_patched(model, here, there, [[Site(layer)]])[0]
        native = model.gates is None and not model.merged
        expected = model.native(there) if native else model(there)
    seen = f"all states of block {layer} from another image, against a native run of that image"
    return as_computed("patch", model.family, plain, edited, expected, seen)


@torch.no_grad()
def prove_export(
    model: VisionModel,
    heads: Iterable[Head],
    folder: Path,
    reload: Callable[[], VisionModel],
) -> Proof:
    """What was written to `folder` against gates on the `heads` that it lacks. Where it differs,
    its weights are deleted."""
    images, gone = random_images(model)[:1], list(heads)
    with model.eval_mode():
        plain = model(images)
        with model.gated(gates_of(model, gone)):
            expected = model(images)
    compared = f"{len(gone)} heads removed in what was written, against gates"
    try:
        loaded = reload()
        with loaded.eval_mode():
            own = model.module.state_dict()
            if not gone and not all(
                torch.equal(own[name], value) for name, value in loaded.module.state_dict().items()
            ):
                reason = "weights changed, though no head was removed"
                raise EditLost("export", str(folder), reason, used_versions())
            asked = loaded.architecture == "prompt"  # a native run for each class name
            edited = loaded(images) if asked else loaded.native(images)
        given = (plain, edited, expected, compared)
        return as_computed("export", str(folder), *given, near=SINGLE)
    except Exception:
        for file in [*folder.glob("*.safetensors"), *folder.glob("*.safetensors.index.json")]:
            file.unlink()
        raise


def proofs(model: ImageModel) -> list[Proof]:
    """Every check of this folder that the model has parts for, for `sc.doctor`."""
    if not isinstance(model, VisionModel):
        return []
    return [
        once(model, "gates", lambda: prove_gates(model)),
        once(model, "patch", lambda: prove_patch(model)),
    ]
